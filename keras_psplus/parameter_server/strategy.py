"""`ParameterServerStrategy` for Keras 3."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import activation, catalogue
from keras_psplus import updates as updates_module
from keras_psplus.arguments import MOST, seconds, shown
from keras_psplus.cluster import config, environment, preflight, serving
from keras_psplus.cluster.channel import RefusedError
from keras_psplus.cluster.discovery import find, resolvers
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.ports import control_address
from keras_psplus.cluster.process import tuning
from keras_psplus.cluster.serving import ServerLease
from keras_psplus.communication import Communication
from keras_psplus.core import live, plan
from keras_psplus.core.base import checks
from keras_psplus.core.jobs import failure
from keras_psplus.core.strategy_engine import StrategyBase
from keras_psplus.parameter_server import traffic
from keras_psplus.parameter_server.context import Mode, OverlapChoice, StepAttempts, StepContext
from keras_psplus.parameter_server.engine import ParameterServerEngine
from keras_psplus.parameter_server.extended import (
    ParameterServerExtended,
    check_partitioner,
    weights_of,
)
from keras_psplus.parameter_server.pulls import Compressors
from keras_psplus.parameter_server.queue import ClosureQueue
from keras_psplus.parameter_server.scheduler import (
    Members,
    Scheduler,
    StallProbe,
    WorkerWatch,
    connect,
    retire_leaving,
)
from keras_psplus.parameter_server.worker_updates import LocalSGDUpdates, WorkerUpdates
from keras_psplus.updates import Updates

if TYPE_CHECKING:
    from keras_psplus.compression import Compressor


def check_mode(mode: str, backup_workers: int, max_staleness: int | None) -> Mode:
    if not isinstance(mode, str) or mode not in ("async", "sync"):
        raise ValueError(f'`mode` must be "async" or "sync". Received: mode={shown(mode)}')
    if not _is_count(backup_workers):
        raise ValueError(
            "`backup_workers` must be an integer from 0 to one less than the number of workers. "
            f"Received: backup_workers={shown(backup_workers)}"
        )
    if max_staleness is not None and not _is_count(max_staleness):
        raise ValueError(
            "`max_staleness` must be None or an integer of at least 0. "
            f"Received: max_staleness={shown(max_staleness)}"
        )
    if backup_workers and mode != "sync":
        raise ValueError(
            "`backup_workers` has a meaning in synchronous training only, where a step waits for "
            'gradients: pass `mode="sync"`, or 0. '
            f"Received: backup_workers={backup_workers!r}, mode={shown(mode)}"
        )
    if max_staleness is not None and mode != "async":
        raise ValueError(
            "`max_staleness` has a meaning in asynchronous training only: synchronous steps are "
            'never stale. Pass `mode="async"`, or None. '
            f"Received: max_staleness={max_staleness!r}, mode={shown(mode)}"
        )
    return Mode(mode == "sync", backup_workers, max_staleness)


def check_updates(updates: Updates | None, mode: Mode) -> Updates | None:
    if updates is None:
        return None
    if not updates.on_parameter_servers:
        raise ValueError(
            "Under parameter servers, `updates` must be `keras_psplus.updates.Accumulate(steps)`, "
            "`LocalSGD(every)`, or None: workers come one by one, so there is no mean of theirs "
            f"for an outer optimizer to step along. Received: updates={updates!r}"
        )
    if mode.is_sync:
        raise ValueError(
            "`updates` has a meaning in asynchronous training only, where each worker updates by "
            'itself: pass `mode="async"`, give the optimizer `gradient_accumulation_steps`, or '
            f'take `MultiWorkerMirroredStrategy`. Received: updates={updates!r}, mode="sync"'
        )
    if mode.max_staleness is not None:
        raise ValueError(
            "`updates` has a meaning without `max_staleness` only: what workers keep back has no "
            "bound on its age. Pass `max_staleness=None`. "
            f"Received: updates={updates!r}, max_staleness={mode.max_staleness!r}"
        )
    return updates


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def check_overlap(overlap_steps: bool | str, mode: Mode, updates: Updates | None) -> bool | None:
    """Checks `overlap_steps`; returns a bool, or None if the first steps are to show it."""
    is_ruled_out = mode.backup_workers or updates is not None
    if isinstance(overlap_steps, str) and overlap_steps == "auto":
        return False if is_ruled_out else None
    if not isinstance(overlap_steps, (bool, np.bool_)):
        raise ValueError(
            '`overlap_steps` must be "auto", True or False. '
            f"Received: overlap_steps={shown(overlap_steps)}"
        )
    if overlap_steps and is_ruled_out:
        raise ValueError(
            "`overlap_steps` goes without `backup_workers`, whose late workers would have to read "
            "every update before the next step, and without `updates`, with which a worker's step "
            "goes on from what its step before has left. Leave one of them out. "
            f"Received: overlap_steps={overlap_steps}, backup_workers={mode.backup_workers}, "
            f"updates={updates!r}"
        )
    return bool(overlap_steps)


def check_min_workers(min_workers: int | None, mode: Mode, num_workers: int) -> int:
    """Checks with how many workers training begins; None for the launcher's number, or all."""
    least = environment.min_workers() if min_workers is None else min_workers
    if least is None:
        return num_workers
    if not _is_count(least) or not 1 <= least <= num_workers:
        raise ValueError(
            "`min_workers` must be an integer from 1 to the number of workers of the cluster. "
            f"Received: min_workers={shown(least)}, for {num_workers} worker(s)"
        )
    mode.check_workers(least)
    return least


def check_no_min_workers(min_workers: int | None) -> None:
    """Raises ValueError if workers are to come to servers that were started otherwise."""
    if min_workers is not None:
        raise ValueError(
            "`min_workers` needs tasks that this library starts: leave out `cluster_resolver`, and "
            f"set TF_CONFIG in all tasks. Received: min_workers={shown(min_workers)}"
        )


Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver


def join_cluster(
    resolver: Resolver | None, mode: Mode, min_workers: int | None, timeout: float
) -> tuple[Resolver, config.TaskConfig | None, set[int], bool]:
    """Waits, in the chief, for the other tasks; in these, serves and ends the process.

    Returns the cluster's resolver, the chief's `TaskConfig` (None if a resolver was given), the
    numbers of the workers that are not there, and whether workers may come and leave.
    """
    if resolver is not None:
        check_no_min_workers(min_workers)
        resolvers.check(resolver)
        return resolver, None, set(), False
    task = read_task()
    num_workers = len(task.cluster["worker"])
    mode.check_workers(num_workers)
    least = check_min_workers(min_workers, mode, num_workers)
    is_elastic = least < num_workers
    if task.task_type in ("ps", "worker"):
        # SIGTERM ends such a worker, which the others go on without.
        may_leave = is_elastic and task.task_type == "worker"
        serving.end_process_after(lambda: serving.serve(task, timeout, may_leave=may_leave))
    tuning.tune()
    tuning.hide_gpus()
    missing = preflight.wait_for_cluster(
        task,
        job_types=("chief", "worker", "ps"),
        timeout=timeout,
        spare_workers=num_workers - least,
    )
    absent = {w for w in range(num_workers) if config.task_name("worker", w) in missing}
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    return resolver, task, absent, is_elastic


def read_task() -> config.TaskConfig:
    """Reads `TF_CONFIG`; raises `ClusterConfigError` if it is not a cluster of this kind."""
    task = find.find_task_config()
    if task is None:
        raise config.ClusterConfigError(
            "ParameterServerStrategy needs a cluster with a chief, workers and ps tasks: set "
            "TF_CONFIG, or start the script by `keras-psplus run --workers 2 --ps 1`. "
            f"Received: TF_CONFIG={os.environ.get('TF_CONFIG', '')!r}"
        )
    find.refuse_evaluator("ParameterServerStrategy", task)
    for job in ("chief", "worker", "ps"):
        if job not in task.cluster:
            raise config.ClusterConfigError(
                f"ParameterServerStrategy needs at least one `{job}` task: start the script by "
                "`keras-psplus run --workers 2 --ps 1` (without --ps there is no chief either), or "
                "add it to TF_CONFIG's cluster. "
                f"Received: {task.describe()}"
            )
    return task


class Servers:
    """The tasks that serve a chief: claimed, connected to, and greeted."""

    def __init__(
        self,
        spec: Mapping[str, Sequence[str]],
        task: config.TaskConfig | None,
        protocol: str | None,
        absent: set[int],
    ) -> None:
        names = {config.task_name("worker", index) for index in absent}
        self._lease, self.notifier = ServerLease(spec, task), None
        self._lease.claim_all(but=names)
        connect(spec, protocol, absent)
        if task is not None:
            failure.install_exit_hook()
            self.notifier = serving.ShutdownNotifier(self._lease.servers, but=names)

    def admit(self, name: str, is_expected: bool = True) -> None:
        """Claims a worker that has come; raises ClusterStartupError if it is not ours.

        `is_expected` if it may be TensorFlow's own server, which says nothing of itself.
        """
        is_claimed = self._lease.claim(name)
        if not is_claimed and is_expected:
            return
        address, own = self._lease.servers[name], serving.own_versions()
        answer = "no answer"
        if is_claimed:
            try:
                theirs = serving.ask(address, "versions", {})
            except (OSError, RefusedError) as error:
                # Also one of a version that knows no such question.
                answer = str(error) or type(error).__name__
            else:
                if theirs == own:
                    return
                raise config.ClusterStartupError(
                    f"{name} ({address}) has other versions than its chief: install {own} there. "
                    f"Received: {theirs}"
                )
        raise config.ClusterStartupError(
            f"{name} ({address}) cannot be asked for its versions on its control channel, "
            f"{control_address(address)}: install {own} there, open that port, and start it with "
            f"the job's {TOKEN_VARIABLE}. Received: {answer}"
        )

    def let_workers_leave(self, queue: ClosureQueue) -> None:
        assert self.notifier is not None
        told_to_end = functools.partial(self.notifier.told_to_end, "worker")
        threading.Thread(
            target=retire_leaving,
            args=(queue, told_to_end),
            name="Departures",
            daemon=True,
        ).start()

    def greet(self, name: str) -> None:
        """Greets a worker that has come, to which this chief is one of many."""
        if self.notifier is not None:
            self.notifier.greet(name)


class ParameterServerStrategy(StrategyBase, tf.distribute.ParameterServerStrategy):
    """Training with variables on parameter servers, for `model.fit` of Keras 3.

    One script in every task of a cluster with a `chief`, `worker` and `ps` tasks. In `worker` and
    `ps` tasks the constructor does not return: it serves until the chief has ended, and then ends
    the process, with exit code 1 if the chief has died. The chief runs the rest of the script and
    sends steps to the workers. Each step reads the variables, computes gradients on its batch and
    applies them, by default without waiting for other workers' steps.

    Args:
        cluster_resolver: Optional `tf.distribute.cluster_resolver.ClusterResolver`, in the chief,
            of a cluster whose servers are started otherwise. By default `TF_CONFIG` is read.
        variable_partitioner: `"auto"`, which shards all but small variables over all parameter
            servers, so that these have as many bytes, in shards of 32 KiB to 1 GiB; None, which
            keeps every variable whole; or one of `tf.distribute.experimental.partitioners`. Of the
            latter two, what comes to 2 GiB on one server, which TensorFlow cannot send, is cut all
            the same.
        startup_timeout: Seconds to wait for the other tasks to start.
        heartbeat_timeout: Seconds for which no worker at all may be reachable before training ends.
        compression: How gradients are sent: a name such as `"bf16"`, `"int8"`, `"topk:0.01"` or
            `"powersgd:4"`, a `keras_psplus.compression.Compressor`, a dict from patterns of
            variables' paths to these, or None to send them as they are. What one step leaves out
            its worker sends in later ones (error feedback), where the compressor needs it.
        pull_compression: How workers read variables: `"bf16"`, `"fp16"`, `"int8"`, a compressor
            whose `supports_values` is True, a dict from patterns to these, or None to read them
            exactly. What was made to be trained is read so, but for vectors and variables of
            fewer than 1,024 elements. The chief reads exactly, and updates run on the exact values.
        mode: `"async"`; or `"sync"`, in which each batch is split over the workers, the parameter
            servers add up their gradients, and one update is made of the mean, as in one process.
        backup_workers: In `"sync"` mode, how many workers' gradients each step does without: the
            others' make the step, and what comes later is dropped. Less than the number of workers.
        max_staleness: In `"async"` mode, how many steps a worker may be ahead of the slowest one
            (stale-synchronous), at least 0; None for any number.
        updates: In `"async"` mode, `keras_psplus.updates.Accumulate(steps)`, by which each worker
            sums its gradients for some batches before it sends them, or `LocalSGD(every)`, by which
            it reads the variables, takes some steps alone and sends what they have changed, or a
            text such as `"accumulate:4"`; None to read and send at each step.
        stall_warning: Seconds that a closure may take until one line says which one, and what it
            waits for; None for no such line.
        overlap_steps: Whether a worker's link is used both ways: a variable that is updated is
            read for the next step while gradients of others are being sent. Training is the same.
            In `"sync"` mode, the servers keep a second copy of what an update writes. `"auto"`: if
            steps are measured to be faster so.
        min_workers: With how many of `TF_CONFIG`'s workers training begins; the
            others may come, and all may leave and come back, while it runs. None for the least
            number of `keras-psplus run --workers MIN:MAX`, or all.

    Raises:
        ValueError: If an argument is out of range, a combination of them has no meaning, or a
            compressor is unknown or unfit.
        keras_psplus.cluster.ClusterConfigError: If `TF_CONFIG` is wrong or has no worker or no ps.
        keras_psplus.cluster.ClusterStartupError: If a task does not come up in time, or serves
            another chief.

    Example:

    ```python
    strategy = keras_psplus.ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(10)])
        model.compile(optimizer="sgd", loss="mse")
    model.fit(dataset, epochs=3)
    ```

    Reference: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI
    2014; Chen et al., "Revisiting Distributed Synchronous SGD", 2016 (backup workers); Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013;
    Keras issue 20601.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A plan is made without a cluster.
        return plan.stand_in() or super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: tf.distribute.experimental.partitioners.Partitioner
        | str
        | None = "auto",
        *,
        startup_timeout: float = 300.0,
        heartbeat_timeout: float = 60.0,
        compression: Compressor | str | dict[Any, Any] | None = None,
        pull_compression: Compressor | str | dict[Any, Any] | None = None,
        mode: str = "async",
        backup_workers: int = 0,
        max_staleness: int | None = None,
        updates: updates_module.Updates | str | None = None,
        stall_warning: float | None = 60.0,
        overlap_steps: bool | str = "auto",
        min_workers: int | None = None,
    ) -> None:
        activation.activate()
        compression, updates = catalogue.fill(
            type(self).__name__, compression=compression, updates=updates
        )
        seconds("startup_timeout", startup_timeout)
        seconds("heartbeat_timeout", heartbeat_timeout)
        stalls.check_stall_warning(stall_warning)
        check_partitioner(variable_partitioner)
        # Before this task waits for others, or serves them.
        compressors = Compressors(compression, pull_compression)
        self._mode = check_mode(mode, backup_workers, max_staleness)
        updates = check_updates(updates_module.get(updates), self._mode)
        overlap = check_overlap(overlap_steps, self._mode, updates)
        cluster_resolver, self._task, absent, is_elastic = join_cluster(
            cluster_resolver, self._mode, min_workers, startup_timeout
        )
        spec = cluster_resolver.cluster_spec().as_dict()
        self._mode.check_workers(len(spec.get("worker", [])))
        weights = weights_of(spec.get("ps", ["ps"]))
        # As TensorFlow's constructor does, but for the implementation half.
        self._cluster_resolver = cluster_resolver
        self._verify_args_and_config(cluster_resolver)
        self._options = {
            "mode": mode,
            "backup_workers": backup_workers,
            "max_staleness": max_staleness,
            "compression": compression,
            "pull_compression": pull_compression,
            "updates": updates,
            "overlap_steps": None if overlap_steps == "auto" else overlap_steps,
            "min_workers": min_workers,
        }
        self._cluster_coordinator = None
        self._engine = ParameterServerEngine(self)
        servers = Servers(spec, self._task, cluster_resolver.rpc_layer, absent)
        self._chief = servers.notifier
        # TensorFlow's `ClusterCoordinator` reads them.
        self._num_workers, self._num_ps = len(spec["worker"]), len(spec["ps"])
        # One worker has nobody to be synchronous with; servers started otherwise have few threads.
        if self._mode.is_sync and (self._num_workers == 1 or self._task is None):
            overlap = False
        # One server's variables stay whole unless they are sure to overlap: Adafactor needs that.
        cuts_finely = bool(overlap or (overlap is None and self._num_ps > 1))
        extended = ParameterServerExtended(
            self, cluster_resolver, variable_partitioner, compressors, weights, cuts_finely
        )
        tf.distribute.Strategy.__init__(self, extended)
        if self._task is None:
            # Servers that are not of this job's launch may go on without their chief.
            atexit.register(self.extended.worker_states.end)
        totals = traffic.TrafficTotals()
        self._communication = Communication()
        self._communication.add_source(totals.traffic, lambda: totals.seconds)
        self._is_parameter_server_strategy_v2 = self._should_use_with_coordinator = True
        self._canonicalize_devices = False
        endings = servers.notifier if is_elastic else None
        admit = functools.partial(servers.admit, is_expected=not is_elastic)
        members = Members(spec["worker"], admit, absent, endings)
        scheduler = Scheduler(
            self._num_workers,
            WorkerWatch(spec["worker"], heartbeat_timeout).check_workers,
            members,
            servers.greet,
            1 if self._mode.is_sync or overlap is False else 2,
            absent,
        )
        self.extended.worker_states.finish_steps = scheduler.join
        if is_elastic:
            self.extended.worker_states.absent = scheduler.queue.lost
            servers.let_workers_leave(scheduler.queue)
        self._progress = Progress(leads=True)
        stalls.Inspector(stall_warning, StallProbe(scheduler.queue, self._progress, spec).look)
        self._context = StepContext(
            strategy=self,
            extended=self.extended,
            engine=self._engine,
            num_workers=self._num_workers,
            mode=self._mode,
            overlap=OverlapChoice(overlap, self._num_workers, totals),
            scheduler=scheduler,
            attempts=StepAttempts(self._mode.backup_workers),
            totals=totals,
            progress=self._progress,
        )
        kind: Any = LocalSGDUpdates if updates is not None and updates.local else WorkerUpdates
        self._context.updating = kind(self._context, updates)
        live.note(self, in_cluster=self._task is not None)

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that describes the cluster."""
        return self._cluster_resolver

    @property
    def num_workers(self) -> int:
        """Number of workers that take steps."""
        return self._num_workers

    @property
    def mode(self) -> str:
        """`"async"` or `"sync"`."""
        return "sync" if self._mode.is_sync else "async"

    @property
    def backup_workers(self) -> int:
        """Number of workers whose gradients each step does without."""
        return self._mode.backup_workers

    @property
    def max_staleness(self) -> int | None:
        """Maximum number of steps ahead of the slowest worker; None for no limit."""
        return self._mode.max_staleness

    @property
    def updates(self) -> updates_module.Updates | None:
        """The `updates` argument."""
        return self._context.updating.policy

    @property
    def dropped_gradients(self) -> int:
        """Number of gradients that were dropped, because enough others had arrived.

        Each step drops `backup_workers` gradients: those that arrived late, and those that a worker
        did not compute, as it was still busy with an earlier step.
        """
        return self._context.attempts.dropped

    @property
    def overlaps_steps(self) -> bool:
        """Whether steps overlap at present; see the argument `overlap_steps`."""
        return self._context.overlap.is_on

    @property
    def steps_by_worker(self) -> list[int]:
        """Training steps of each worker in the present epoch, or the last."""
        return [self._context.steps_by_worker[worker] for worker in range(self._num_workers)]

    def finish_updates(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Has every worker send what it still has: sums of gradients, or changes.

        Args:
            optimizer: The model's optimizer.

        Raises:
            ValueError: If the strategy has no `updates`.

        Example:

        ```python
        model.fit(dataset, epochs=3)
        strategy.finish_updates(model.optimizer)
        ```
        """
        checks.check_has_updates(self.updates)
        self._context.updating.finish(optimizer)
