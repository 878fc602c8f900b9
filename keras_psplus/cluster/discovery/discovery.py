"""Finds the cluster of this process: in TF_CONFIG, or in what its launcher says."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping

from keras_psplus.cluster.config import ClusterConfigError, TaskConfig, read_task_config
from keras_psplus.cluster.discovery import kubernetes, layout, proxies, rank_variables, slurm
from keras_psplus.cluster.discovery.layout import LAYOUT_VARIABLE
from keras_psplus.cluster.discovery.ranks import Ranks
from keras_psplus.log import logger

# Which launcher's variables count; "none" for a process that trains alone.
CLUSTER_VARIABLE = "KERAS_PSPLUS_CLUSTER"
_NONE = "none"
_READERS: dict[str, Callable[[Mapping[str, str]], Ranks | None]] = {
    slurm.NAME: slurm.read,
    kubernetes.NAME: kubernetes.read,
    rank_variables.MPI: rank_variables.read_mpi,
    rank_variables.TORCHRUN: rank_variables.read_torchrun,
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
        proxies.bypass(config, environ)
    return config


def find_ranks(environ: Mapping[str, str]) -> Ranks | None:
    """Reads the launcher's variables; None without a launcher, or for a single process.

    Raises:
        ClusterConfigError: If launchers contradict each other.
    """
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
    counts = layout.parse(text) if text else {"worker": ranks.size}
    ranks = ranks.within(sum(counts.values()), environ)
    found = layout.task_config(counts, ranks.addresses(environ, timeout), ranks.rank)
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
    if text and sum(layout.parse(text).values()) > 1:
        raise ClusterConfigError(
            f"{LAYOUT_VARIABLE} has several tasks, but nothing says which of them this process is. "
            "Start the processes by srun, mpirun or torchrun, as a Kubernetes Indexed Job, or by "
            f"`keras-psplus run`; or set TF_CONFIG. {alone} "
            f"Received: {LAYOUT_VARIABLE}={text}"
        )
    tasks = slurm.processes_outside_of_a_step(environ)
    if tasks > 1:
        raise ClusterConfigError(
            f"This Slurm job has {tasks} tasks, but this process was not started by srun: it would "
            f"train alone. Start the script by `srun python train.py`. {alone} "
            f"Received: SLURM_NTASKS={tasks} without SLURM_STEP_NUM_TASKS"
        )
