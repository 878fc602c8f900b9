"""Dynamic tables as a hash table of row numbers and a variable of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.tables import initial_rows
from keras_psplus.tables.snapshot import Snapshot

_LONG = tf.int64
_CHUNK = 1 << 18


class FrozenTable(tf.Module):
    """Value of a `KeyedVariable` while a model is exported.

    Both parts are saved as variables are, and not as constants of a graph, of which TensorFlow
    takes 2 GiB.

    Args:
        spec: Of the table's `RowStore`.
        snapshot: Its contents.
    """

    def __init__(self, spec: dict[str, Any], snapshot: Snapshot) -> None:
        super().__init__()
        self._initial = initial_rows.maker_of_missing(spec)
        # The last row is that of all other keys.
        self._missing = len(snapshot.keys)
        zeros = np.zeros([1, spec["dim"]], np.float32)
        self.rows = tf.Variable(
            np.concatenate([snapshot.rows, zeros]), trainable=False, name=f"{spec['name']}/rows"
        )
        self.numbers = tf.lookup.experimental.MutableHashTable(_LONG, _LONG, self._missing)
        for first in range(0, self._missing, _CHUNK):
            keys = snapshot.keys[first : first + _CHUNK]
            self.numbers.insert(keys, np.arange(first, first + len(keys)))

    def lookup_keys(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        """Rows of an int64 vector of keys."""
        numbers = self.numbers.lookup(keys)
        rows = tf.gather(self.rows, numbers)
        if self._initial is None:
            return rows
        is_missing = tf.equal(numbers, self._missing)[:, tf.newaxis]
        return tf.where(is_missing, self._initial(keys), rows)
