"""Counts what a step sends, in its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from keras_psplus.cluster.monitor import trace
from keras_psplus.communication import Traffic
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.tf_internals import framework_ops as ops

# Path, direction and description of the compressor, as in `Traffic`.
Key: TypeAlias = tuple[str, str, str | None]


class TensorTraffic(NamedTuple):
    """Bytes of one variable's gradient at one step: Python numbers, or scalars of the graph.

    Attributes:
        compressor: Description of the compressor, or None.
        logical: Bytes of the gradient.
        compressed: Bytes of the payload.
        wire: Bytes that the replica sends for it.
        between: Those of them that go to another group of the topology.
        direction: As in `Traffic`.
    """

    path: str
    compressor: str | None
    logical: Any
    compressed: Any
    wire: Any
    between: Any = 0
    direction: str = "gradient"


class TrafficVariables:
    """Totals of what steps send, in variables on a CPU.

    Args:
        device: The CPU's name; by default that of the worker.
    """

    def __init__(self, device: str = "CPU:0") -> None:
        self._device = device
        # By who counts, and what a step sends.
        self._totals: dict[tuple[int, tuple[Key, ...]], tf.Variable] = {}
        self._seconds: Any = None

    def add(self, entries: Sequence[TensorTraffic], replica: int = 0) -> None:
        """Adds the entries of one step, in the graph.

        Args:
            replica: Number of the local replica that counts: branches of one do not wait for those
                of another.
        """
        if not entries:
            return
        keys = replica, tuple((each.path, each.direction, each.compressor) for each in entries)
        with ops.device(self._device):
            numbers = [
                [
                    tf.cast(n, tf.int64) if tf.is_tensor(n) else n
                    for n in (e.logical, e.compressed, e.wire, e.between)
                ]
                for e in entries
            ]
            if keys not in self._totals:
                self._totals[keys] = self._zeros([len(entries), 4], tf.int64)
            counted = tf.convert_to_tensor(numbers, tf.int64)
            self._totals[keys].assign_add(counted, read_value=False)

    def time(self, before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> None:
        """Adds the time between two points of the graph.

        Each point is reached when all of its tensors are computed.
        """
        reached = []
        for tensors in (before, after):
            # One message from a GPU to the host, instead of one for each tensor.
            with tf.control_dependencies(tensors):
                reached.append(tf.no_op())
        with ops.device(self._device):
            if self._seconds is None:
                self._seconds = self._zeros([], tf.float64)
            with tf.control_dependencies(reached[:1]):
                begin = tf.timestamp()
            with tf.control_dependencies([begin, *reached[1:]]):
                end = tf.timestamp()
            self._seconds.assign_add(tf.maximum(end - begin, 0.0), read_value=False)
            recorder = trace.current()
            if recorder is not None:
                if recorder.collective is None:
                    recorder.collective = self._zeros([2], tf.float64)
                recorder.collective.assign(tf.stack([begin, end]), read_value=False)

    @property
    def seconds(self) -> float:
        """Seconds that `time` has added up."""
        return 0.0 if self._seconds is None else float(self._seconds.numpy())

    def traffic(self) -> list[Traffic]:
        """List of `Traffic`."""
        sums: dict[Key, tuple[int, ...]] = {}
        # Another thread may be tracing a step.
        for (_, keys), variable in list(self._totals.items()):
            for key, numbers in zip(keys, variable.numpy().tolist()):
                so_far = sums.get(key, (0, 0, 0, 0))
                sums[key] = tuple(a + b for a, b in zip(so_far, numbers))
        return [Traffic(*key, *numbers) for key, numbers in sums.items()]

    def _zeros(self, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        return made_outside(lambda: tf.zeros(shape, dtype), self._device)
