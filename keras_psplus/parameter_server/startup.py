"""Role of a task at start-up: serve, or run the rest of the script."""

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from keras_psplus.cluster import config, preflight, serving
from keras_psplus.cluster.channel.sessions import RefusedError
from keras_psplus.cluster.discovery import find, resolvers
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.ports import control_address
from keras_psplus.cluster.process import tuning
from keras_psplus.cluster.serving import ServerLease
from keras_psplus.core.jobs import failure
from keras_psplus.parameter_server import modes
from keras_psplus.parameter_server.scheduling import membership
from keras_psplus.parameter_server.scheduling.queue import ClosureQueue

Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver


def join_cluster(
    resolver: Resolver | None, mode: modes.Mode, min_workers: int | None, timeout: float
) -> tuple[Resolver, config.TaskConfig | None, set[int], bool]:
    """Waits, in the chief, for the other tasks; in these, serves and ends the process.

    Returns:
        The resolver that describes the cluster, the chief's `TaskConfig` (None if a resolver was
        given), the numbers of the workers that are not there, and whether workers may come and
        leave.
    """
    if resolver is not None:
        modes.check_no_min_workers(min_workers)
        resolvers.check(resolver)
        return resolver, None, set(), False
    task = read_task()
    num_workers = len(task.cluster["worker"])
    mode.check_workers(num_workers)
    least = modes.check_min_workers(min_workers, mode, num_workers)
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
    """The tasks that serve a chief: claimed, connected to, and greeted.

    Attributes:
        notifier: `ShutdownNotifier`, or None without a `TaskConfig`.
    """

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
        membership.connect(spec, protocol, absent)
        if task is not None:
            failure.install_exit_hook()
            self.notifier = serving.ShutdownNotifier(self._lease.servers, but=names)

    def admit(self, name: str, is_expected: bool = True) -> None:
        """Claims a worker that has come; raises ClusterStartupError if it is not ours.

        Args:
            is_expected: Whether it may be TensorFlow's own server, which says nothing of itself.
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
        """Does without workers that are told to end, from now on."""
        assert self.notifier is not None
        told_to_end = functools.partial(self.notifier.told_to_end, "worker")
        threading.Thread(
            target=membership.retire_leaving,
            args=(queue, told_to_end),
            name="Departures",
            daemon=True,
        ).start()

    def greet(self, name: str) -> None:
        """Greets a worker that has come, to which this chief is one of many."""
        if self.notifier is not None:
            self.notifier.greet(name)
