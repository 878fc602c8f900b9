"""Keys that have lost their rows, for those who follow a table."""

import os

import tensorflow as tf

from keras_psplus.tables.rows import chunks
from keras_psplus.tables.rows.chunks import ChunkedRows
from keras_psplus.tables.rows.graphs import places_of

_INT, _LONG = tf.int32, tf.int64
# So that a message has them all.
_MOST = 1 << 18
# Those who read it.
PUBLISHING, BACKUPS = range(2)


class RemovalLog:
    """The last keys that were removed, each with the update in which it was.

    A reader that has followed the log to an update gets what came after it; what all readers have
    followed is forgotten. Once it is full, or the rows were set otherwise than by updates, it
    begins again, with another number of its generation: a reader that has followed the one before
    has to read the whole table.

    Attributes:
        generation: int64 variable.
    """

    def __init__(self) -> None:
        self._most = min(_MOST, chunks.MOST_ROWS)
        self._removed = ChunkedRows(2, _LONG, self._most)
        with tf.init_scope():
            self._count = tf.Variable(0, dtype=_INT, trainable=False)
            self._floor = tf.Variable(0, dtype=_LONG, trainable=False)
            # Up to which update each reader has it; the largest number of one that does not read.
            self._read = tf.Variable([_LONG.max] * 2, dtype=_LONG, trainable=False)
            # Another one in a process that is started again.
            first = int.from_bytes(os.urandom(6), "big")
            self.generation = tf.Variable(first, dtype=_LONG, trainable=False)

    def note(self, keys: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
        """Adds keys that an update removes; returns a tensor to wait for."""
        count, size = self._count.read_value(), tf.size(keys)

        def add() -> tf.Tensor:
            self._removed.allocate(count + size)
            updates = tf.fill([size], tf.cast(update, _LONG))
            rows = tf.range(count, count + size)
            with tf.control_dependencies([self._removed.write(rows, tf.stack([keys, updates], 1))]):
                return self._count.assign_add(size, read_value=True)

        return tf.cond(count + size <= self._most, add, self.begin)

    def begin(self) -> tf.Tensor:
        """Begins another generation; returns a tensor to wait for."""
        with tf.control_dependencies([self.generation.assign_add(1, read_value=True)]):
            self._floor.assign(0, read_value=False)
            self._read.assign([_LONG.max] * 2, read_value=False)
            return self._count.assign(0, read_value=True)

    def since(
        self, reader: int, generation: tf.Tensor, update: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys that were removed after an update, up to which a reader has all.

        Args:
            reader: `PUBLISHING` or `BACKUPS`.
            generation: That of the log when the reader read it.
            update: The last one at that time.

        Returns:
            Whether the log has all since then, and the int64 keys.
        """
        removed = self._removed.sparse_read(tf.range(self._count.read_value()))
        floor, same = self._floor.read_value(), tf.equal(generation, self.generation.read_value())
        is_known = tf.logical_and(same, update >= floor)
        read = tf.tensor_scatter_nd_update(
            self._read.read_value(), [[reader]], [tf.where(is_known, update, floor)]
        )
        floor = tf.reduce_min(read)
        kept = tf.gather(removed, places_of(removed[:, 1] > floor))
        with tf.control_dependencies([self._removed.write(tf.range(tf.shape(kept)[0]), kept)]):
            self._count.assign(tf.shape(kept)[0], read_value=False)
            self._floor.assign(floor, read_value=False)
            self._read.assign(read, read_value=False)
        after = places_of(tf.logical_and(is_known, kept[:, 1] > update))
        return is_known, tf.gather(kept[:, 0], after)
