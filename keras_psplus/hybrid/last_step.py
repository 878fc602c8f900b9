"""What the last step has changed in a table, so that it can be read as it was before."""

import tensorflow as tf

_INT, _FLOAT = tf.int32, tf.float32


class LastStep:
    """The rows that one step has changed, as they were.

    A worker that asks ahead for the next batch's rows gets those of the same step, whether its
    request is faster or slower than the update that the others are making.

    Args:
        weights: `tf.Variable` of shape `(rows, dim)`.
    """

    def __init__(self, weights):
        dim = weights.shape[1]
        self._weights = weights
        self._ids = tf.Variable(tf.zeros([0], _INT), shape=[None], trainable=False)
        self._rows = tf.Variable(tf.zeros([0, dim]), shape=[None, dim], trainable=False)

    def keep(self, ids):
        """Keeps rows that are about to change, in the place of those of the step before."""
        self._rows.assign(self._weights.sparse_read(ids), read_value=False)
        self._ids.assign(ids, read_value=False)

    def rows_before(self, ids):
        """Rows as they were before that step.

        Args:
            ids: int32 vector.
        """
        changed = self._ids.read_value()
        order = tf.argsort(changed)
        in_order = tf.gather(changed, order)
        at = tf.searchsorted(in_order, ids)
        # One more, so that ids beyond the last one find something that is not theirs.
        was_changed = tf.equal(tf.gather(tf.concat([in_order, [-1]], 0), at), ids)
        old = tf.gather(tf.pad(self._rows.read_value(), [[0, 1], [0, 0]]), _padded(order, at))
        return tf.where(was_changed[:, tf.newaxis], old, self._weights.sparse_read(ids))


def _padded(order, at):
    return tf.gather(tf.concat([order, [tf.size(order)]], 0), at)
