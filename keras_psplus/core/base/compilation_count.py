"""Counts compilations of parts of a model: one for each form of their arguments."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_psplus.log import logger

MOST = 10
_LISTED = 3


class CompilationCount:
    """Forms of the tensors that compiled functions of one model were called with.

    Shapes that are known when a step is traced are noted in Python. Others are noted by the step
    itself, in a table of this process.

    Args:
        is_local: Whether this process computes the functions.
    """

    def __init__(self, name: str, is_local: bool = True) -> None:
        self._name, self._is_local = name, is_local
        self._known: dict[str, set[str]] = {}
        self._tables: dict[str, tf.lookup.experimental.MutableHashTable] = {}
        self._said: set[str] = set()

    def note(self, layers: str, tensors: Sequence[tf.Tensor]) -> None:
        """Notes a call of a function that is being traced.

        Args:
            layers: Names of the layers that the function calls.
        """
        if all(tensor.shape.is_fully_defined() for tensor in tensors):
            shapes = " ".join(str(tuple(tensor.shape)) for tensor in tensors)
            self._known.setdefault(layers, set()).add(shapes)
        elif self._is_local:
            with tf.init_scope(), tf.device("CPU:0"):
                if layers not in self._tables:
                    self._tables[layers] = tf.lookup.experimental.MutableHashTable(
                        tf.string, tf.int64, 0
                    )
            with tf.device("CPU:0"):
                texts = [
                    tf.strings.reduce_join(tf.strings.as_string(tf.shape(one)), separator=", ")
                    for one in tensors
                    if one.shape.rank != 0
                ]
                shapes = tf.strings.join([*("(" + text + ")" for text in texts)], " ")
                self._tables[layers].insert(shapes, tf.ones([], tf.int64))

    def forms(self, layers: str) -> list[str]:
        """The shapes that some layers were called with, as text."""
        found = set(self._known.get(layers, ()))
        if layers in self._tables:
            keys, _ = self._tables[layers].export()
            found |= {key.decode() for key in keys.numpy()}
        return sorted(found)

    def report(self) -> None:
        """Logs which layers were called with more than ten forms of tensors, once for each."""
        for layers in {*self._known, *self._tables} - self._said:
            forms = self.forms(layers)
            if len(forms) > MOST:
                self._said.add(layers)
                logger.info(
                    "XLA has compiled %s of '%s' %d times, for tensors of the shapes %s and "
                    "others: pad sequences and batches to few sizes",
                    layers,
                    self._name,
                    len(forms),
                    ", ".join(forms[:_LISTED]),
                )
