"""Dynamic tables outside of an exported model, which is given the rows it needs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.tables import initial_rows

_LONG = tf.int64


class OutsideTable:
    """Value of a `KeyedVariable` while a model is exported that takes its rows.

    Args:
        spec: Of the table's `RowStore`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name, self._dim = spec["name"], spec["dim"]
        self._initial = initial_rows.maker_of_missing(spec)
        self._given: Sequence[tf.Tensor] | None = None
        self._asked: list[tf.Tensor] = []

    @property
    def signature(self) -> list[tf.TensorSpec]:
        """Specifications of keys and their rows, which the exported model takes."""
        name = re.sub(r"\W", "_", self.name)
        return [
            tf.TensorSpec([None], _LONG, name=f"{name}_keys"),
            tf.TensorSpec([None, self._dim], tf.float32, name=f"{name}_rows"),
        ]

    @contextlib.contextmanager
    def given(self, keys: tf.Tensor, rows: tf.Tensor) -> Iterator[None]:
        """Context in which lookups are among keys and rows, in any order."""
        order = tf.argsort(keys)
        # Behind them is what other keys have.
        self._given = tf.gather(keys, order), tf.pad(tf.gather(rows, order), [[0, 1], [0, 0]])
        try:
            yield
        finally:
            self._given = None

    @contextlib.contextmanager
    def asked(self) -> Iterator[list[tf.Tensor]]:
        """Context that returns the keys of its lookups, which get zeros."""
        self._asked = []
        yield self._asked

    def lookup_keys(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        """Rows of an int64 vector of keys."""
        if self._given is None:
            self._asked.append(keys)
            return tf.zeros([tf.size(keys), self._dim])
        known, rows = self._given
        places = tf.searchsorted(known, keys)
        # Of those behind all others, any will do.
        there = tf.gather(tf.pad(known, [[0, 1]]), places)
        is_known = tf.logical_and(places < tf.size(known), tf.equal(there, keys))
        found = tf.gather(rows, tf.where(is_known, places, tf.size(known)))
        if self._initial is None:
            return found
        return tf.where(is_known[:, tf.newaxis], found, self._initial(keys))


def keys_of(asked: Sequence[tf.Tensor]) -> tf.Tensor:
    """Distinct keys of all lookups."""
    return tf.unique(tf.concat([tf.zeros([0], _LONG), *asked], 0)).y
