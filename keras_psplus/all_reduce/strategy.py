"""`MultiWorkerMirroredStrategy` for Keras 3."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus import activation, catalogue
from keras_psplus import updates as updates_module
from keras_psplus.all_reduce import liveness, shard_option, startup
from keras_psplus.all_reduce.collectives.hop import DEFAULT_BUCKET_BYTES
from keras_psplus.all_reduce.engine import AllReduceEngine, OneReplicaEngine
from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.all_reduce.liveness import StallProbe
from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
from keras_psplus.all_reduce.topology import auto_topology
from keras_psplus.all_reduce.topology import group_topology as topology_module
from keras_psplus.arguments import MOST, number, seconds
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.process import memory, signals
from keras_psplus.core import live, seeds
from keras_psplus.core.base import checks
from keras_psplus.core.batch import batches
from keras_psplus.core.jobs import failure, leave
from keras_psplus.core.jobs.control import ControlPlane
from keras_psplus.core.strategy_engine import StrategyBase
from keras_psplus.tf_internals import autograph_api as autograph
from keras_psplus.tf_internals import autograph_context as ag_ctx
from keras_psplus.tf_internals import def_function, distribute_utils

if TYPE_CHECKING:
    import keras

    from keras_psplus.cluster.config import TaskConfig
    from keras_psplus.communication import Communication
    from keras_psplus.compression import Compressor
    from keras_psplus.core.strategy_engine import StrategyEngine


class MultiWorkerMirroredStrategy(StrategyBase, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on several workers, for `model.fit` of Keras 3.

    Every worker runs the same script, with its own `TF_CONFIG`. Variables are mirrored on all
    replicas; each step's global batch (the user's batch size) is split over them and their
    gradients are summed by TensorFlow's collectives, so that weights and metrics equal those of
    one process trained on the same batches. Without `TF_CONFIG` the process trains alone, on all
    its GPUs or logical CPU devices.

    Args:
        cluster_resolver: Optional `tf.distribute.cluster_resolver.ClusterResolver`, for clusters
            that neither `TF_CONFIG` nor the variables of a scheduler describe.
        communication_options: Optional `tf.distribute.experimental.CommunicationOptions`, to
            choose NCCL or ring or to set a timeout for collectives.
        startup_timeout: Seconds to wait for the other workers to start. The process ends with the
            list of who is missing after that.
        heartbeat_timeout: Seconds without a sign of life after which a worker counts as dead, to
            within 2 seconds.
        stall_warning: Seconds for which a step may wait until one line says for what, and which
            workers have not arrived; None for no such line.
        bucket_bytes: Size in bytes of the buckets in which gradients are sent while backprop goes
            on.
        topology: The path along which gradients are summed: None or `"flat"`, one ring of all
            workers; or groups of one size, of workers with fast links inside, such as
            `[["worker-0", "worker-1"], ["worker-2", "worker-3"]]`, by their names or numbers: sums
            inside each group first, then between groups. `"auto"` measures the links at start, and
            takes groups if they are faster; without groups, `compression` is that of the ring.
        compression: How gradients are sent: a name such as `"bf16"`, `"int8"`, `"topk:0.01"` or
            `"powersgd:4"`, a `keras_psplus.compression.Compressor`, a dict from patterns of
            variables' paths to these, or None to send them as they are. What one step leaves out
            is sent in later ones (error feedback), where the compressor needs it. With groups, it
            is for the hop between them; a dict `{"within": "bf16", "between": "int8"}` is for both.
            With `shard`, a dict `{"gradients": "int8", "weights": "bf16"}` compresses what is
            gathered of weights, too.
        updates: When the workers communicate: `keras_psplus.updates.Accumulate(steps)`,
            `LocalSGD(every)` or `DiLoCo(every)`, or a text such as `"accumulate:4"`,
            `"local_sgd:8"` or `"diloco:100"`; None for every step.
        shard: `"optimizer"` to leave each worker a part of the optimizer's state and of the summed
            gradients (ZeRO stages 1 and 2); `"all"` for a part of the weights, too (ZeRO stage 3,
            or FSDP); None for all of it on every worker.
        reshard_after_forward: Whether weights of `shard="all"` are freed between forward and
            backward, which gathers them once more; without, fewer bytes are sent.
        shard_group: Number of consecutive workers, such as those of one host, that share; each
            group has all parts, and sums of parts go from group to group. None for all workers.

    Raises:
        ValueError: If an argument is out of range, `compression`, `updates` or `shard` is unknown,
            `topology` has not each worker in one group, or groups of several sizes, or `shard`
            cannot be combined with others.
        keras_psplus.cluster.ClusterConfigError: If `TF_CONFIG` is wrong.
        keras_psplus.cluster.ClusterStartupError: If a worker does not come up in time.
        RuntimeError: If TensorFlow was initialised before the strategy was made.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(10)])
        model.compile(optimizer="sgd", loss="mse")
    model.fit(x, y, batch_size=64, epochs=3)
    ```

    Reference: https://www.tensorflow.org/guide/distributed_training; Keras issue 20585,
    TensorFlow issue 72388, Ray issue 47464.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        startup_timeout: float = 300.0,
        heartbeat_timeout: float = 20.0,
        stall_warning: float | None = 60.0,
        bucket_bytes: float = DEFAULT_BUCKET_BYTES,
        compression: str | Compressor | dict[str, Any] | None = None,
        updates: str | updates_module.Updates | None = None,
        topology: str | Sequence[Sequence[str | int]] | None = None,
        shard: str | None = None,
        reshard_after_forward: bool = True,
        shard_group: int | None = None,
    ) -> None:
        activation.activate()
        compression, updates = catalogue.fill(
            type(self).__name__, compression=compression, updates=updates
        )
        seconds("startup_timeout", startup_timeout)
        seconds("heartbeat_timeout", heartbeat_timeout)
        number("bucket_bytes", bucket_bytes, "a positive, finite number", lambda b: 0 < b <= MOST)
        stalls.check_stall_warning(stall_warning)
        startup.check_communication_options(communication_options)
        workers = startup.workers_of(startup.task_of(cluster_resolver))
        self._topology = topology_module.get(topology, workers)
        self._updates = updates_module.get(updates)
        exchanged = shard, shard_group, compression, self._updates, self._topology
        hops, of_weights = shard_option.check_all(*exchanged, workers, self._engine_class)
        self.reshard_after_forward = shard_option.check_reshard(shard, reshard_after_forward)
        self._task = self._start(cluster_resolver, startup_timeout, heartbeat_timeout)
        multi_worker = self._task is not None and self._task.num_workers > 1
        control: ControlPlane | None = None
        if multi_worker:
            assert self._task is not None
            heartbeats = liveness.HeartbeatWatch(self._task, heartbeat_timeout)
            control = ControlPlane(
                self._task, startup_timeout, stall_warning, lambda: heartbeats.lost
            )
        self._options = {"compression": compression, "updates": updates, "topology": topology}
        self._options |= {"shard": shard, "shard_group": shard_group}
        if shard is not None and multi_worker:
            chosen = shard_option.classes(shard, of_weights, shard_group, self._engine_class)
            self._engine_class, self._extended_class = chosen
            # All that is freed would stay in the process, which then is as large as without shares.
            memory.keep_little_freed_memory()
        self._engine: StrategyEngine | None = None
        self._wrapped_functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._step_marks = liveness.StepMarks()
        with failure.translate_errors(self._task):
            tf.distribute.Strategy.__init__(
                self,
                self._extended_class(
                    self,
                    startup.resolver_for(self._task, cluster_resolver),
                    communication_options or tf.distribute.experimental.CommunicationOptions(),
                    control,
                    hops,
                    math.ceil(bucket_bytes),
                    self._updates,
                    self._topology,
                    **self._extended_options,
                ),
            )
            signals.restore_handler()
            shard_option.check_devices(shard, len(self.extended.worker_devices))
            if self._topology == topology_module.AUTO:
                self._topology = auto_topology.choose(self.extended)
        self._progress = Progress(leads=self._task is not None and self._task.is_chief)
        if self.extended.world.local_replicas == 1 and self._task is not None:
            self._step_marks.clock.start(
                self._task, self._progress, lambda: self.communication.seconds
            )
        if multi_worker:
            assert self._task is not None and control is not None
            leave.watch(self._task, lambda: heartbeats.lost)
            failure.watch(self._task, control.post_end)
            heartbeats.start(self._progress)
            with failure.translate_errors(self._task):
                seeds.agree(control, self._rows_are_shared)
            liveness.watch(control, self._progress, self._step_marks, self._updates is not None)
        if self._task is not None and len(self._task.tasks()) > 1:
            stalls.Inspector(stall_warning, self._waits(self._task).look)
        if self._distributes:
            live.note(self, in_cluster=self._task is not None)

    def _waits(self, task: TaskConfig) -> StallProbe:
        return StallProbe(task, self._progress, self._step_marks)

    # Whether several workers compute with the same rows.
    _rows_are_shared = False
    _extended_class: Callable[..., MultiWorkerMirroredExtended] = MultiWorkerMirroredExtended
    # Further arguments of its own.
    _extended_options: Mapping[str, Any] = MappingProxyType({})
    _start = staticmethod(startup.start)

    @property
    def _distributes(self) -> bool:
        """Whether a model that is not this strategy's would be left out of something."""
        return self.num_replicas_in_sync > 1

    @property
    def _is_active(self) -> bool:
        """True if anything is distributed."""
        return self.num_replicas_in_sync > 1 or self._updates is not None

    _engine_class = AllReduceEngine

    @property
    def engine(self) -> StrategyEngine:
        """Engine of the strategy, a `keras_psplus.engine.Engine`."""
        if self._engine is None:
            self._engine = (self._engine_class if self._is_active else OneReplicaEngine)(self)
        return self._engine

    @property
    def updates(self) -> updates_module.Updates | None:
        """The `updates` argument."""
        return self._updates

    @property
    def communication(self) -> Communication:
        """Communication costs of gradients, a `keras_psplus.communication.Communication`."""
        return self.extended.reducers.communication

    def finish_updates(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Applies the pending update or average, from the gradients accumulated so far.

        Afterwards all workers have the same weights. For the end of a training loop with
        `train_on_batch`, or a custom one; to be called on all workers.

        Args:
            optimizer: The model's optimizer.

        Raises:
            ValueError: If it is no optimizer, or the strategy has no `updates`.

        Example:

        ```python
        for x, y in batches:
            model.train_on_batch(x, y)
        strategy.finish_updates(model.optimizer)
        ```
        """
        self._updating_of(optimizer).finish(optimizer)

    def _updating_of(self, optimizer: keras.optimizers.Optimizer) -> Any:
        checks.check_optimizer(optimizer)
        checks.check_has_updates(self.extended.updating)
        return self.extended.updating

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes checkpoints and logs."""
        return bool(self.extended._is_chief)

    @property
    def num_workers(self) -> int:
        """Number of processes that train."""
        return self.extended._num_workers

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Runs `fn` on each replica; see `tf.distribute.Strategy.run`.

        Batches of a dataset that Keras distributed are opened, so that `fn` gets the data alone.

        Args:
            fn: The function.
            args: Its positional arguments; values for each replica are divided.
            kwargs: Its keyword arguments, in the same way.
            options: `tf.distribute.RunOptions`.

        Returns:
            What `fn` returns, for each replica.
        """
        if not self._is_active:
            return super().run(fn, args, kwargs, options)
        args = tuple(_per_replica(arg) for arg in args)
        if isinstance(fn, def_function.Function):
            wrapped = self._wrapped_functions.get(fn)
            if wrapped is None:
                wrapped = fn._clone(python_function=self._in_step(fn.python_function))
                self._wrapped_functions[fn] = wrapped
            return super().run(wrapped, args, kwargs, options)
        converted = autograph.tf_convert(fn, ag_ctx.control_status_ctx(), convert_by_default=False)
        return super().run(self._in_step(converted), args, kwargs, options)

    def _in_step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def in_step(*args: Any, **kwargs: Any) -> Any:
            batch = next((a for a in args if isinstance(a, batches.Batch)), None)
            args = tuple(a.data if isinstance(a, batches.Batch) else a for a in args)
            device, marks = self.extended.device_in_context(), self._step_marks
            marks.received(device, (args, kwargs))
            tracing = contextlib.nullcontext() if tf.executing_eagerly() else marks.tracing()
            with tracing, MirroredReplicaStep(self.engine, self.extended, batch) as step:
                result = fn(*args, **kwargs)
                # Variables that a custom loop changed through Keras; a Keras step has none left.
                step.synchronise(means=step.changed)
            marks.finished(device, result)
            return result

        return tf.autograph.experimental.do_not_convert(in_step)


def _per_replica(arg: Any) -> Any:
    """Turns the shards of a step into a per-replica batch."""
    if isinstance(arg, batches.Shards):
        return distribute_utils.regroup(arg.replicas)
    return arg
