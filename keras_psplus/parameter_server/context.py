"""The objects of a strategy that its steps are made with."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.parameter_server.scheduling.worker_times import WorkerTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras

    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.core.distributed_engine import DistributedEngine
    from keras_psplus.parameter_server.extended import ParameterServerExtended
    from keras_psplus.parameter_server.modes import Mode
    from keras_psplus.parameter_server.scheduling.scheduler import Scheduler
    from keras_psplus.parameter_server.sync.automatic import OverlapChoice
    from keras_psplus.parameter_server.sync.step_attempts import StepAttempts
    from keras_psplus.parameter_server.tracing.traffic import TrafficTotals
    from keras_psplus.parameter_server.worker_updates import WorkerUpdates


@dataclasses.dataclass(eq=False)
class StepContext:
    """The objects that steps are made with; parts take this instead of the strategy.

    Attributes:
        extended: The strategy's implementation half: variables, compressors, the workers' states.
        mode: When workers wait for one another.
        overlap: Whether a worker reads for its next training step before it has sent this one's.
        attempts: The global steps of `mode="sync"`.
        totals: Totals of the traffic counters, for `communication`.
        updating: Gradients accumulated on workers, and the schedule of sending them.
        steps_by_worker: Number of training steps of the present epoch by worker.
        functions: Functions of models with a method `drain`, whose steps may be under way.
    """

    strategy: tf.distribute.Strategy
    extended: ParameterServerExtended
    engine: DistributedEngine
    num_workers: int
    mode: Mode
    overlap: OverlapChoice
    scheduler: Scheduler
    attempts: StepAttempts
    totals: TrafficTotals
    progress: Progress
    times: WorkerTimes = dataclasses.field(init=False)
    updating: WorkerUpdates = dataclasses.field(init=False)
    steps_by_worker: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )
    functions: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.times = WorkerTimes(self.progress)

    def server_addresses(self) -> list[str]:
        """Addresses of the parameter servers, in order; the resolver is asked."""
        return self.strategy.cluster_resolver.cluster_spec().as_dict()["ps"]

    def push(
        self, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        """Sends the gradients of an optimizer to their servers, as `Pushes.send`."""
        # Sums begin to be applied with the first that are whole.
        in_turn = self.mode.is_sync and self.overlap.is_on
        return self.extended.pushes.send(
            grads,
            variables,
            lambda: tf.convert_to_tensor(optimizer.iterations),
            optimizer,
            in_turn=in_turn,
        )

    def drain(self, but: Any = None) -> None:
        """Waits for the steps of all functions, and has them write what they have counted."""
        for function in list(self.functions):
            if function is not but:
                function.drain()
