"""Undo log of the last step, for reading rows as they were before it.

    version            7                            8
    log                -        rows 3, 5           rows 3, 5 as of 7
    table         rows as of 7    | update of 3, 5 |    rows as of 8
    lookup(7)     all from the table                3, 5 from the log, the others from the table

1. `record` copies the rows that a step is about to change to the log, in place of the last step's.
2. The optimizer updates these rows, and the shard increments `version`.
3. `lookup` at a step reads the table. If the table is one step further, rows in the log replace it.
   It holds the lock of the updates, so that it sees none of them half done.
"""

from collections.abc import Callable

import tensorflow as tf

_INT = tf.int32
_LONG = tf.int64


class RowUndoLog:
    """The rows that one step has changed, as they were.

    A worker that asks ahead for the next batch's rows gets those of the same step, whether its
    request is faster or slower than the update that the others are making.

    Args:
        weights: `tf.Variable` of shape `(rows, dim)`.
        version: `tf.Variable`, the number of steps that were applied.
    """

    def __init__(self, weights: tf.Variable, version: tf.Variable) -> None:
        dim = weights.shape[1]
        self._weights, self._version = weights, version
        self._ids = tf.Variable(tf.zeros([0], _INT), shape=[None], trainable=False)
        self._rows = tf.Variable(tf.zeros([0, dim]), shape=[None, dim], trainable=False)

    def record(self, ids: tf.Tensor) -> None:
        """Keeps rows that are about to change, in place of those of the step before."""
        self._rows.assign(self._weights.sparse_read(ids), read_value=False)
        self._ids.assign(ids, read_value=False)

    def lookup(
        self, lock: tf.CriticalSection, encode: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    ) -> tf.types.experimental.PolymorphicFunction:
        """Makes a method that looks rows up as of a given step.

        The step is the present one or the one before.

        Args:
            lock: `tf.CriticalSection` of whatever changes the table.
            encode: Function of rows and a step that compresses rows.
        """
        signature = [tf.TensorSpec([], _LONG), tf.TensorSpec([None], _INT)]

        @tf.function(input_signature=signature, autograph=False)
        def lookup_at(step: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
            def locked() -> tf.Tensor:
                return tf.cond(
                    tf.equal(step + 1, self._version.read_value()),
                    lambda: self._before(ids),
                    lambda: self._weights.sparse_read(ids),
                )

            rows = tf.ensure_shape(lock.execute(locked), [None, self._weights.shape[1]])
            return encode(rows, step)

        return lookup_at

    def _before(self, ids: tf.Tensor) -> tf.Tensor:
        changed = self._ids.read_value()
        order = tf.argsort(changed)
        in_order = tf.gather(changed, order)
        at = tf.searchsorted(in_order, ids)
        # One more of each, so that ids beyond the last one find something that is not theirs.
        was_changed = tf.equal(tf.gather(tf.concat([in_order, [-1]], 0), at), ids)
        rows = tf.pad(self._rows.read_value(), [[0, 1], [0, 0]])
        old = tf.gather(rows, tf.gather(tf.pad(order, [[0, 1]]), at))
        return tf.where(was_changed[:, tf.newaxis], old, self._weights.sparse_read(ids))
