"""Counts updates lost when a parameter server restarts."""

import tensorflow as tf

_LONG = tf.int64
_UNKNOWN = -1


class MissingUpdates:
    """Counter of updates that a restart has lost, found from workers' pushes.

    Args:
        replicas: Number of replicas that push.
        parts: A push's number is that of the step times this, plus that of a part.
    """

    def __init__(self, replicas: int, parts: int) -> None:
        self._parts = parts
        self._lost = tf.Variable(tf.zeros([replicas], _LONG), trainable=False)

    def begin(self) -> None:
        """Expects pushes of all replicas that tell how far they are."""
        self._lost.assign(tf.fill(self._lost.shape, tf.constant(_UNKNOWN, _LONG)))

    def note(self, replica: tf.Tensor, push: tf.Tensor, last_push: tf.Tensor) -> tf.Tensor:
        """Counts, at the first push of a replica, those that it will not send again.

        Args:
            replica: Its index.
            push: The push's number.
            last_push: That of the last one that is in the rows.

        Returns:
            A tensor to wait for.
        """

        def count() -> tf.Tensor:
            whole = tf.maximum(push // self._parts - last_push // self._parts - 1, 0)
            # The first parts of this one may be lost as well.
            lost = whole + tf.cast(push % self._parts > 0, _LONG)
            noted = tf.raw_ops.ResourceScatterUpdate(
                resource=self._lost.handle, indices=replica, updates=lost
            )
            with tf.control_dependencies([noted]):
                return tf.identity(lost)

        known = self._lost.sparse_read(replica)
        return tf.cond(tf.equal(known, _UNKNOWN), count, lambda: known)

    def counted(self) -> tuple[int, bool]:
        """Their number, and whether all replicas have been heard."""
        lost = self._lost.numpy()
        return int(lost[lost != _UNKNOWN].sum()), bool((lost != _UNKNOWN).all())
