"""Owners of rows: replicas that alone have changed them, with a good copy.

    step          1        2        3        4
    changes row   A        A        A, B     B
    owner         A        A        nobody   B
    copy is good  A at 2   A at 3   -        B at 5

A replica reads a row in each step in which it changes it. Who was the only one to change it last,
and has applied the same update to its copy since it read it, has what the server has.

Owners are kept for a bounded number of rows: of two whose hashes fall on one cell, the one that was
changed last. An answer begins with a bit for each copy that was asked about, 24 in a float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from keras_psplus.hybrid.rows.row_codec import RowCodec
from keras_psplus.tables.keys import mixed

_INT, _LONG, _FLOAT, _HASH = tf.int32, tf.int64, tf.float32, tf.uint64
_BITS = 24
# A cell has the lower 48 bits of a hash, and an owner. Its number is the hash's upper bits, at
# least 16 of them, so that no two rows are taken for each other.
_OWNER_BITS, _NOBODY = 16, (1 << 16) - 1
_CELLS = 8


class RowOwners:
    """Owners of rows of one shard.

    Args:
        rows: Number of rows of which a worker has copies.
    """

    def __init__(self, rows: int) -> None:
        bits = max((_CELLS * rows - 1).bit_length(), _OWNER_BITS)
        self._shift = 64 - bits
        self._cells = tf.Variable(tf.fill([1 << bits], tf.constant(-1, _LONG)), trainable=False)

    @classmethod
    def of_table(cls, spec: Mapping[str, Any]) -> RowOwners | None:
        """Owners of a table whose cache is to be exact; None of others."""
        cache = spec.get("cache")
        return cls(cache["rows"]) if cache is not None and not cache["staleness"] else None

    def note(
        self,
        ids: tf.Tensor,
        positions: tf.Tensor,
        parts: tuple[tf.Tensor, tf.Tensor],
        can_have: tf.Tensor,
    ) -> None:
        """Notes whose gradients are in an update.

        Args:
            ids: Vector of the rows that it changes.
            positions: For each gradient, the index of its row in `ids`.
            parts: Integer vectors: the sender of each part of the gradients, and how many it has.
            can_have: bool vector, whether the sender of all can own the row.
        """
        senders, count = tf.cast(tf.repeat(*parts), _INT), tf.size(ids)
        first = tf.math.unsorted_segment_min(senders, positions, count)
        last = tf.math.unsorted_segment_max(senders, positions, count)
        is_owner = tf.logical_and(tf.equal(first, last), can_have)
        cells, content = self._content(ids, tf.where(is_owner, first, _NOBODY))
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._cells.handle, indices=cells, updates=content
        )

    def lookup(
        self,
        dtype: tf.DType,
        are_there: Callable[[tf.Tensor], tf.Tensor],
        rows_of: Callable[[tf.Tensor], tf.Tensor],
        encode: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.types.experimental.PolymorphicFunction:
        """Makes a method that looks up rows of which a replica has no good copy.

        Args:
            dtype: Of ids.
            are_there: Function of ids that says which of them have a row.
            rows_of: Function of ids that returns rows.
            encode: Function of rows that compresses them.
        """
        # The replica, and how many of the ids, the first ones, it has a copy of.
        signature = [tf.TensorSpec([2], _LONG), tf.TensorSpec([None], dtype)]

        @tf.function(input_signature=signature, autograph=False)
        def lookup_changed(header: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
            replica, count = tf.unstack(header)
            copied = ids[:count]
            is_good = tf.logical_and(self._are_of(replica, copied), are_there(copied))
            changed = tf.boolean_mask(copied, tf.logical_not(is_good))
            return with_bits(is_good, encode(rows_of(tf.concat([changed, ids[count:]], 0))))

        return lookup_changed

    def _are_of(self, replica: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """For each id, whether its owner is the replica."""
        cells, content = self._content(ids, tf.fill(tf.shape(ids), tf.cast(replica, _INT)))
        return tf.equal(self._cells.sparse_read(cells), content)

    def _content(self, ids: tf.Tensor, owners: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        hashes = mixed(tf.cast(ids, _LONG))
        upper = tf.bitwise.right_shift(hashes, tf.constant(self._shift, _HASH))
        lower = tf.bitwise.left_shift(hashes, tf.constant(_OWNER_BITS, _HASH))
        content = tf.bitwise.bitwise_or(lower, tf.cast(owners, _HASH))
        return tf.cast(upper, _LONG), tf.bitcast(content, _LONG)


def with_bits(bits: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Words of rows behind the words of a bool vector."""
    width = words.shape[1]
    padded = tf.pad(tf.cast(bits, _FLOAT), [[0, -tf.size(bits) % (_BITS * width)]])
    by_word = tf.reshape(padded, [-1, width, _BITS])
    return tf.concat([tf.linalg.matvec(by_word, 2.0 ** tf.range(_BITS, dtype=_FLOAT)), words], 0)


def split_bits(answer: tf.Tensor, count: tf.Tensor, codec: RowCodec) -> tuple[tf.Tensor, tf.Tensor]:
    """A bool vector of `count`, and words of rows, as `with_bits` has put them together."""
    lines = -(-count // (_BITS * codec.width))
    numbers = tf.cast(tf.reshape(answer[:lines], [-1, 1]), _INT)
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(numbers, tf.range(_BITS)), 1)
    return tf.reshape(bits, [-1])[:count] > 0, answer[lines:]
