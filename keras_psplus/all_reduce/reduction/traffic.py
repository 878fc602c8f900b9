"""Counts what one replica's gradients cost on the wire, in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.cluster.monitor import trace
from keras_psplus.communication import Traffic
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import resource_variable_ops


class TensorTraffic(NamedTuple):
    """Bytes of one variable's gradient at one step: Python numbers, or scalars of the graph.

    Attributes:
        path: The variable's path.
        compressor: Description of the compressor, or None.
        logical: Bytes of the gradient.
        compressed: Bytes of the payload.
        wire: Bytes that the replica sends for it.
        between: Those of them that go to another group of the topology.
    """

    path: str
    compressor: str | None
    logical: Any
    compressed: Any
    wire: Any
    between: Any = 0


class TrafficVariables:
    """Totals of one replica, in variables on its worker's CPU."""

    def __init__(self) -> None:
        self._totals: dict[tuple[tuple[str, str | None], ...], tf.Variable] = {}
        self._seconds: Any = None

    def add(self, entries: Sequence[TensorTraffic]) -> None:
        """Adds the entries of one step, in the graph."""
        if not entries:
            return
        key = tuple((entry.path, entry.compressor) for entry in entries)
        with ops.device("CPU:0"):
            if key not in self._totals:
                self._totals[key] = _zeros([len(entries), 4], tf.int64)
            counted = [
                [
                    tf.cast(n, tf.int64) if tf.is_tensor(n) else tf.constant(n, tf.int64)
                    for n in (e.logical, e.compressed, e.wire, e.between)
                ]
                for e in entries
            ]
            self._totals[key].assign_add(tf.stack(counted), read_value=False)

    def time(self, before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> None:
        """Adds the time between two points of the graph.

        Each point is reached when all of its tensors are computed.
        """
        with ops.device("CPU:0"):
            if self._seconds is None:
                self._seconds = _zeros([], tf.float64)
            with tf.control_dependencies(before):
                begin = tf.timestamp()
            with tf.control_dependencies([begin, *after]):
                end = tf.timestamp()
            self._seconds.assign_add(tf.maximum(end - begin, 0.0), read_value=False)
            recorder = trace.current()
            if recorder is not None:
                if recorder.collective is None:
                    recorder.collective = _zeros([2], tf.float64)
                recorder.collective.assign(tf.stack([begin, end]), read_value=False)

    @property
    def seconds(self) -> float:
        """Seconds that `time` has added up."""
        return 0.0 if self._seconds is None else float(self._seconds.numpy())

    def traffic(self) -> list[Traffic]:
        """List of `Traffic`."""
        sums: dict[tuple[str, str | None], tuple[int, ...]] = {}
        for key, variable in self._totals.items():
            for entry, numbers in zip(key, variable.numpy().tolist()):
                so_far = sums.get(entry, (0, 0, 0, 0))
                sums[entry] = tuple(a + b for a, b in zip(so_far, numbers))
        return [
            Traffic(path, "gradient", compressor, *numbers)
            for (path, compressor), numbers in sums.items()
        ]


def _zeros(shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    with ops.init_scope(), ops.device("CPU:0"):
        return resource_variable_ops.ResourceVariable(tf.zeros(shape, dtype), trainable=False)
