"""Finds the cluster of this process: in TF_CONFIG, or in what its launcher says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping

from keras_psplus import activation, text_table
from keras_psplus.cluster.config import (
    EVALUATOR,
    ClusterConfigError,
    TaskConfig,
    read_task_config,
    split_address,
)
from keras_psplus.cluster.discovery import launchers
from keras_psplus.cluster.discovery.launchers import LAYOUT_VARIABLE, Ranks
from keras_psplus.log import info_once, logger

# Proxies of the environment, through which gRPC would send what tasks send each other.
#
# gRPC reads the variables when it connects: `grpc_proxy`, `https_proxy` or `http_proxy`, and the
# hosts without one from `no_grpc_proxy`, or else from `no_proxy`. (The handshake before TensorFlow
# starts uses none, so that the cluster would seem to be well.)

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
_MOST_SHOWN = 4


def proxy_of(environ: MutableMapping[str, str] | None = None) -> str | None:
    """Returns the name of the variable whose proxy gRPC uses; None if there is none."""
    environ = os.environ if environ is None else environ
    return next((name for name in _PROXIES if environ.get(name)), None)


def bypass(task: TaskConfig, environ: MutableMapping[str, str] | None = None) -> None:
    """Has the tasks of a cluster talk to each other without a proxy.

    Other libraries read `no_proxy`, which stays as it is.

    Example:

    ```python
    environ = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost"}
    bypass(TaskConfig({"worker": ("h1:2222", "h2:2222")}, "worker", 0), environ)
    environ["no_grpc_proxy"]  # "localhost,h1,h2"
    ```
    """
    environ = os.environ if environ is None else environ
    proxy = proxy_of(environ)
    if proxy is None:
        return
    # If the first of them is set, the second does not count.
    given = next((environ[name] for name in _EXCEPTIONS if environ.get(name)), "")
    excepted = [entry.strip() for entry in given.split(",") if entry.strip()]
    hosts = dict.fromkeys(split_address(address)[0] for _, _, address in task.tasks())
    missing = [host for host in hosts if not _is_excepted(host, excepted)]
    if not missing:
        return
    environ["no_grpc_proxy"] = ",".join([*excepted, *missing])
    if task.is_chief:
        info_once(
            "%s is set: tasks talk to each other without it (no_grpc_proxy has %s now)",
            proxy,
            text_table.listed(missing, _MOST_SHOWN),
        )


def _is_excepted(host: str, entries: Iterable[str]) -> bool:
    """Whether a host ends with one of the entries, compared as in gRPC."""
    return any(host.lower().endswith(entry.lower()) for entry in entries)


# The launcher whose variables count; "none" for a process that trains alone.
CLUSTER_VARIABLE = "KERAS_PSPLUS_CLUSTER"
_NONE = "none"
_READERS: dict[str, Callable[[Mapping[str, str]], Ranks | None]] = {
    launchers.SLURM: launchers.read_slurm,
    launchers.KUBERNETES: launchers.read_kubernetes,
    launchers.MPI: launchers.read_mpi,
    launchers.TORCHRUN: launchers.read_torchrun,
}


def find_task_config(
    environ: MutableMapping[str, str] | None = None, timeout: float = 300.0
) -> TaskConfig | None:
    """Finds this process's cluster, and keeps it in TF_CONFIG.

    TF_CONFIG counts if it is set. Else the variables of Slurm, of a Kubernetes Indexed Job, of MPI
    and of torchrun are read; every process is a worker, or what `KERAS_PSPLUS_LAYOUT` says of its
    rank. TF_CONFIG is then set for what this process starts, and for other libraries; a line in the
    log says what was found. A proxy in the environment is kept off the cluster's addresses.

    Args:
        environ: The environment; `os.environ` by default.
        timeout: Seconds to wait for other processes, where the launcher names the first one's host
            alone, so that they have to tell each other theirs.

    Returns:
        A `TaskConfig`, or None if the process trains alone.

    Raises:
        ClusterConfigError: If the variables contradict each other, or are parts of a cluster alone.

    Example:

    ```python
    # srun --ntasks=4 python train.py, in the second process:
    find_task_config().name  # "worker-1"
    ```
    """
    environ = os.environ if environ is None else environ
    config = read_task_config(environ) or _from_ranks(environ, timeout)
    if config is not None:
        bypass(config, environ)
    return config


def find_ranks(environ: Mapping[str, str]) -> Ranks | None:
    """Reads the launcher's variables; None without a launcher, or for a single process."""
    chosen = environ.get(CLUSTER_VARIABLE, "")
    if chosen and chosen not in (_NONE, *_READERS):
        raise ClusterConfigError(
            f"{CLUSTER_VARIABLE} must be one of {', '.join((*_READERS, _NONE))}. "
            f"Received: {CLUSTER_VARIABLE}={chosen}"
        )
    if chosen == _NONE:
        return None
    names = [chosen] if chosen else list(_READERS)
    found = [ranks for name in names if (ranks := _READERS[name](environ)) is not None]
    for other in found[1:]:
        if (other.rank, other.size) != (found[0].rank, found[0].size):
            raise ClusterConfigError(
                "Two launchers contradict each other: "
                + ", and ".join(f"by {r.source} this is {r.rank} of {r.size}" for r in found)
                + f". Set {CLUSTER_VARIABLE} to the one that has started the processes "
                f"({', '.join(names)}), or set TF_CONFIG. Received: {CLUSTER_VARIABLE} is not set"
            )
    # One that knows hosts, of those that agree.
    knowing = [ranks for ranks in found if ranks.hosts is not None]
    return next(iter(knowing + found), None)


def _from_ranks(environ: MutableMapping[str, str], timeout: float) -> TaskConfig | None:
    ranks = find_ranks(environ)
    text = environ.get(LAYOUT_VARIABLE, "")
    if ranks is None:
        _check_alone(environ, text)
        return None
    counts = launchers.parse(text) if text else {"worker": ranks.size}
    ranks = ranks.within(sum(counts.values()), environ)
    found = launchers.task_config(counts, ranks.addresses(environ, timeout), ranks.rank)
    environ["TF_CONFIG"] = found.to_tf_config()
    # As TF_CONFIG is read: with the same errors.
    config = read_task_config(environ)
    assert config is not None
    logger.info(
        "found the cluster in the variables of %s: this is %s of %s, at %s",
        ranks.source,
        config.name,
        ", ".join(f"{count} {job}" for job, count in counts.items()),
        config.address or "no address",
    )
    return config


def _check_alone(environ: Mapping[str, str], text: str) -> None:
    """Refuses to train alone where the environment has parts of a cluster."""
    if environ.get(CLUSTER_VARIABLE) == _NONE:
        return
    alone = f"Set {CLUSTER_VARIABLE}=none if this process is to train alone."
    if text and sum(launchers.parse(text).values()) > 1:
        raise ClusterConfigError(
            f"{LAYOUT_VARIABLE} has several tasks, but nothing says which of them this process is. "
            "Start the processes by srun, mpirun or torchrun, as a Kubernetes Indexed Job, or by "
            f"`keras-psplus run`; or set TF_CONFIG. {alone} "
            f"Received: {LAYOUT_VARIABLE}={text}"
        )
    tasks = launchers.processes_outside_of_a_step(environ)
    if tasks > 1:
        raise ClusterConfigError(
            f"This Slurm job has {tasks} tasks, but this process was not started by srun: it would "
            f"train alone. Start the script by `srun python train.py`. {alone} "
            f"Received: SLURM_NTASKS={tasks} without SLURM_STEP_NUM_TASKS"
        )


# Roles of processes in their cluster, for scripts that all tasks run.


def task_type() -> str | None:
    """Returns this process's task type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.

    Example:

    ```python
    if keras_psplus.task_type() == "evaluator":
        keras_psplus.SidecarEvaluator(model, data, "checkpoints").start()
    else:
        model.fit(...)
    ```

    Returns:
        A string, or None if the process trains alone.

    Raises:
        ClusterConfigError: If the cluster is described wrongly.
    """
    activation.activate()
    task = find_task_config()
    return None if task is None else task.task_type


def is_evaluator() -> bool:
    """Whether this process stands beside its cluster, to evaluate what that trains."""
    return task_type() == EVALUATOR


def refuse_evaluator(strategy: str, task: TaskConfig | None) -> None:
    """Refuses to make a strategy in a process that is not in the cluster."""
    if task is not None and task.task_type == EVALUATOR:
        raise ClusterConfigError(
            f"An evaluator is not in the cluster, and has no part in {strategy}. Make the strategy "
            "by `keras_psplus.strategy_from_env()`, which is TensorFlow's default one in an "
            "evaluator, or make none if `keras_psplus.task_type() == 'evaluator'`. "
            f"Received: {task.describe()}"
        )


def refuse_training(method: str) -> None:
    """Refuses to train in an evaluator: it would train its own model."""
    if is_evaluator():
        raise RuntimeError(
            f"This process is an evaluator, and trains nothing. Where `keras_psplus.task_type() == "
            f"'evaluator'`, call `keras_psplus.SidecarEvaluator(...).start()` instead of {method}. "
            f"Received: {method}() in an evaluator"
        )
