"""One replica's part of one step, and its fraction of the batch.

A replica's gradients and means count by its fraction of the batch, `local_rows / global_rows`, so
that their sum over the replicas is that of the global batch, also when the batch is uneven.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import tensorflow as tf

from keras_psplus.cluster.monitor import trace
from keras_psplus.communication import Traffic
from keras_psplus.core.graph.metrics import MetricLosses
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.graph.compiled_calls import CompiledCalls
    from keras_psplus.engine import Engine


_local = threading.local()


def current_step() -> ReplicaStep | None:
    """The `ReplicaStep` that this thread is in, or None."""
    step: ReplicaStep | None = getattr(_local, "step", None)
    return step


class ReplicaStep:
    """Context of one replica's part of one step.

    Attributes:
        can_sum: Whether replicas can ask each other during the step.
        metric_losses: `MetricLosses` of the step.
        compiled_calls: `CompiledCalls` if XLA is to compile calls of models, else None.
    """

    can_sum = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.metric_losses = MetricLosses()
        self.compiled_calls: CompiledCalls | None = None

    @classmethod
    def current(cls) -> Self | None:
        """The step of this kind that this thread is in, or None."""
        step = current_step()
        return step if isinstance(step, cls) else None

    def __enter__(self) -> Self:
        self._outer, _local.step = current_step(), self
        return self

    def __exit__(self, *exc: object) -> None:
        _local.step = self._outer

    @property
    def has_batch_fraction(self) -> bool:
        """Whether the step knows the replica's fraction of the global batch."""
        raise NotImplementedError

    def batch_fraction(self) -> tf.Tensor:
        """The replica's fraction of the global batch, `local_rows / global_rows`, a scalar."""
        raise NotImplementedError

    def is_of_batch(self, target: Any) -> bool:
        """Whether a tape's target is known to be the same on all replicas."""
        return False

    def scale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor:
        return value * tf.cast(self.batch_fraction(), value.dtype)

    def result_of(self, metric: keras.metrics.Metric, result: Callable[..., Any]) -> Any:
        """A metric's method `result`, as this step's code is to call it."""
        return result

    def as_read(self, variable: Any, value: tf.Tensor) -> tf.Tensor:
        """The value of a variable on parameter servers, as this step may see it."""
        return value

    def unscale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def sum_over_replicas(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums scalars over all replicas; those of the batch alone, unless the step `can_sum`."""
        raise NotImplementedError


def current_step_with_batch_fraction() -> ReplicaStep | None:
    step = current_step()
    return step if step is not None and step.has_batch_fraction else None


# Counts what a step sends, in its graph.


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
        sums: dict[Key, tuple[int, ...]] = {}
        # Another thread may be tracing a step.
        for (_, keys), variable in list(self._totals.items()):
            for key, numbers in zip(keys, variable.numpy().tolist()):
                so_far = sums.get(key, (0, 0, 0, 0))
                sums[key] = tuple(a + b for a, b in zip(so_far, numbers))
        return [Traffic(*key, *numbers) for key, numbers in sums.items()]

    def _zeros(self, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        return made_outside(lambda: tf.zeros(shape, dtype), self._device)


# Readings of a clock in a function's graph.


def time_after(operations: Iterable[tf.Tensor | tf.Operation]) -> tf.Tensor:
    """Time at which some operations are done, whatever else the graph does."""
    with tf.control_dependencies(list(operations)):
        now = tf.timestamp()
    run_apart(now.op)
    return now


def run_apart(operation: tf.Operation) -> tf.Operation:
    """Keeps TensorFlow from running an operation after all stateful ones that were made before."""
    manager = ops.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)
    return operation
