"""Connection of TensorFlow in the chief to the tasks that are there.

TensorFlow calls all of them when one comes. By itself it would wait without end for one that dies
just then, or hangs; here its call fails, and the job goes on without that one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from keras_psplus.cluster.monitor import stalls, step_times
from keras_psplus.core.jobs import failure
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

_RETRIES = 4
_FAIL_FAST = "GRPC_FAIL_FAST"
_PATIENCE_SECONDS, _LOOK_SECONDS, _GIVE_UP_SECONDS = 10.0, 1.0, 120.0


def connect(spec: Mapping[str, Sequence[str]], protocol: str | None, absent: set[int]) -> None:
    """Connects TensorFlow in the chief to the tasks that are there.

    Args:
        spec: Dict from jobs to lists of addresses.
        absent: Numbers of the workers that are not there.
    """
    # As `ParameterServerStrategy` of TensorFlow does, but for absent workers.
    seen = tf.config.experimental.ClusterDeviceFilters()
    for job, other in (("worker", "ps"), ("ps", "worker")):
        for index in range(len(spec[job])):
            seen.set_device_filters(job, index, [f"/job:{other}", "/job:chief"])
    # A stream of operations that is opened as its worker is lost would wait until it is back.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
    # TensorFlow's default. A variable that is there can be changed while other threads read it.
    os.environ.setdefault(_FAIL_FAST, "use_caller")
    there = {job: dict(enumerate(addresses)) for job, addresses in spec.items()}
    there["worker"] = {i: a for i, a in there["worker"].items() if i not in absent}
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(there), "chief", 0, protocol, cluster_device_filters=seen
    )
    context.set_server_def_retries(_RETRIES)
    context.ensure_initialized()


def update(workers: Mapping[int, str]) -> None:
    """Has TensorFlow know some workers, and no other, while no step is under way.

    Args:
        workers: Dict from their numbers to their addresses.

    Raises:
        tf.errors.OpError: If one cannot be reached, has died or does not answer. TensorFlow knows
            of it all the same, and finds out by the next call whether it is back.
    """
    definition = copy.deepcopy(context.get_server_def())
    for job in definition.cluster.job:
        if job.name == "worker":
            job.tasks.clear()
            for number, address in sorted(workers.items()):
                job.tasks[number] = address
    with _failing_fast(), _silent_ones_cut_off(workers):
        context.context().update_server_def(definition)


@contextlib.contextmanager
def _failing_fast() -> Iterator[None]:
    """Context in which TensorFlow's call of a task whose address refuses it fails at once.

    By default this is so of all calls but the first one of a task, which asks for its devices.
    """
    before = os.environ.get(_FAIL_FAST, "use_caller")
    os.environ[_FAIL_FAST] = "true"
    try:
        yield
    finally:
        os.environ[_FAIL_FAST] = before


@contextlib.contextmanager
def _silent_ones_cut_off(workers: Mapping[int, str]) -> Iterator[None]:
    is_done = threading.Event()
    threading.Thread(
        target=_cut_off_silent_ones, args=(workers, is_done), name="Connection", daemon=True
    ).start()
    try:
        yield
    finally:
        is_done.set()


def _cut_off_silent_ones(workers: Mapping[int, str], is_done: threading.Event) -> None:
    """Breaks the connections to workers that do not answer, for whom TensorFlow waits."""
    began, seconds, told = time.monotonic(), _PATIENCE_SECONDS, set[int]()
    while not is_done.wait(seconds):
        silent = sorted(stalls.unresponsive_tasks(workers))
        waited = time.monotonic() - began
        for worker in [] if is_done.is_set() else silent:
            seconds = _LOOK_SECONDS
            if worker not in told:
                told.add(worker)
                logger.warning(
                    "worker-%d does not answer while TensorFlow connects to the workers: it counts "
                    "as lost, and is taken in when it answers. Received: no answer from %s for "
                    "%.0f s",
                    *(worker, workers[worker], waited),
                )
            if waited > _GIVE_UP_SECONDS:
                logger.error(
                    "worker-%d does not answer, and TensorFlow still waits for it: no step can be "
                    "taken any more. Start the job again; it resumes at its last backup. Received: "
                    "no answer from %s for %.0f s",
                    *(worker, workers[worker], waited),
                )
                failure.exit_now()
            step_times.cut(workers[worker])
