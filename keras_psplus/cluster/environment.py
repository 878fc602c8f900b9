"""The environment of each task of a cluster: TF_CONFIG, its share of cores, variables."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence

from keras_psplus.cluster.config import (
    EVALUATOR,
    JOB_TYPES,
    ClusterConfigError,
    TaskConfig,
    read_task_config,
)
from keras_psplus.cluster.ports import free_ports

# GPUs of this machine, and those that each of its tasks sees.

VISIBLE = "CUDA_VISIBLE_DEVICES"
# TensorFlow otherwise reserves nearly all of a GPU's memory for the first process.
_GROWTH = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
_LIST_SECONDS = 20.0


def visible(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names of the GPUs that processes of this environment see, as `CUDA_VISIBLE_DEVICES` has them.

    TensorFlow is not asked, as it would begin to use them.
    """
    found = named(environ)
    return [str(number) for number in range(_count())] if found is None else found


def named(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Names in `CUDA_VISIBLE_DEVICES`, or None if it is not set."""
    environ = os.environ if environ is None else environ
    if VISIBLE not in environ:
        return None
    names = [name.strip() for name in environ[VISIBLE].split(",") if name.strip()]
    # CUDA takes those before the first that there cannot be.
    return list(itertools.takewhile(lambda name: name != "-1", names))


@functools.cache
def _count() -> int:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_LIST_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def split(gpus: Sequence[str], workers: int, per_worker: int | None = None) -> list[dict[str, str]]:
    """Environment variables by which workers of one machine share its GPUs.

    Each worker gets GPUs of its own, or, if there are fewer than workers, one that it shares and
    takes no more memory of than it needs.

    Returns:
        Dict of variables for each worker.

    Example:

    >>> split(["0", "1"], workers=2)
    [{'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '1'}]
    """
    if per_worker is not None and per_worker * workers > len(gpus):
        raise ValueError(
            f"{workers} workers of {per_worker} GPUs need {workers * per_worker}, and this machine "
            f"has {len(gpus)}. Received: --gpus_per_worker={per_worker}, --workers={workers}"
        )
    if per_worker is None and 0 < len(gpus) < workers:
        return [{VISIBLE: gpus[i % len(gpus)], **_GROWTH} for i in range(workers)]
    each = len(gpus) // max(1, workers) if per_worker is None else per_worker
    return [{VISIBLE: ",".join(gpus[i * each : (i + 1) * each])} for i in range(workers)]


def describe(tasks: Mapping[str, Mapping[str, str]]) -> str:
    """A sentence that says which GPUs tasks use; empty if none does."""
    names = {task: own[VISIBLE] for task, own in tasks.items() if own.get(VISIBLE)}
    if len(set(names.values())) == len(names):
        return "; ".join(f"{task} has GPU {name}" for task, name in names.items())
    shared = ", ".join(sorted(set(names.values())))
    return f"{len(names)} tasks share GPU {shared}, and each takes the memory that it needs"


# Secret that the tasks of one job share.
TOKEN_VARIABLE = "KERAS_PSPLUS_JOB_TOKEN"
# Number of times that the launcher has started the job before.
RESTART_VARIABLE = "KERAS_PSPLUS_RESTART"
# With how many workers a job of a range of them begins.
MIN_WORKERS_VARIABLE = "KERAS_PSPLUS_MIN_WORKERS"
# Sign of training's end for an evaluator: "stdin", the end of its standard input.
TRAINING_END_VARIABLE = "KERAS_PSPLUS_TRAINING_END"
_DEFAULT_PORT = 2222
_MIN_INTER_OP_THREADS = 2  # with one, an operation that waits for a peer blocks all others


@dataclasses.dataclass(frozen=True)
class Task:
    """A task to start: its place in the cluster and the variables that tell it."""

    config: TaskConfig
    variables: dict[str, str]

    @property
    def name(self) -> str:
        return self.config.name


def plan_tasks(
    workers: int = 2,
    ps: int = 0,
    chief: bool = False,
    hosts: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    share_cores: bool | None = None,
    evaluator: bool = False,
    gpus_per_worker: int | None = None,
) -> list[Task]:
    """Gives each task of a cluster its address and its environment variables.

    Example:

    ```python
    for task in plan_tasks(workers=2, ps=1, chief=True):
        print(task.name, task.variables["TF_CONFIG"])
    ```

    Args:
        chief: Whether there is a chief beside the workers.
        hosts: Addresses for the tasks in order (chief, workers, ps), the port
            optional. Without it all tasks run on this machine, on free ports,
            and share its cores.
        environ: The environment that the tasks inherit; `os.environ` by
            default. Variables that the user has set there are kept.
        share_cores: Whether all tasks run on this machine and share its
            cores; by default, without `hosts`.
        evaluator: Whether an evaluator runs beside the cluster, on any host.
        gpus_per_worker: Number of this machine's GPUs that each worker sees, if the
            tasks share it; by default all are divided, one for each worker at most
            if a chief drives them. Tasks of other kinds see none.

    Returns:
        A list of `Task`, chief first, then workers, then ps, then the evaluator.
    """
    counts = {"chief": int(bool(chief)), "worker": workers, "ps": ps}
    if min(counts.values()) < 0 or counts["chief"] + workers == 0:
        raise ValueError(
            "A cluster needs at least one worker or a chief. "
            f"Received: workers={workers}, ps={ps}, chief={chief}"
        )
    total = sum(counts.values())
    addresses = _addresses(hosts, total)
    if share_cores is None:
        share_cores = not hosts
    variables = _thread_split(counts["chief"] + workers + evaluator, environ) if share_cores else {}
    cluster, start = {}, 0
    for job, count in counts.items():
        if count:
            cluster[job] = tuple(addresses[start : start + count])
        start += count
    places = [(job, index) for job in cluster for index in range(len(cluster[job]))]
    places += [(EVALUATOR, 0)] if evaluator else []
    seen = _gpus(counts, environ, gpus_per_worker) if share_cores else {}
    tasks = [
        Task(config, {"TF_CONFIG": config.to_tf_config(), **variables, **seen.get(place, {})})
        for place, config in ((place, TaskConfig(cluster, *place)) for place in places)
    ]
    if hosts:
        read_task_config(tasks[0].variables)  # as the tasks will, on the other machines
    return tasks


def share_of_host(
    counts: Mapping[str, int],
    place: tuple[str, int],
    environ: Mapping[str, str],
    has_ps: bool = False,
    gpus_per_worker: int | None = None,
) -> dict[str, str]:
    """Variables by which a task shares this host's cores and GPUs with others.

    Args:
        counts: Dict from job types to the numbers of the cluster's tasks on this host.
        place: The task's job type, and its number among those.
        has_ps: Whether the cluster has parameter servers, on any host.

    Raises:
        ValueError: If the host has fewer GPUs than `gpus_per_worker` asks for.
    """
    jobs = dict.fromkeys((*JOB_TYPES, EVALUATOR), 0) | dict(counts)
    variables = _thread_split(max(1, sum(jobs.values()) - jobs["ps"]), environ)
    jobs["ps"] = max(jobs["ps"], int(has_ps))
    return variables | _gpus(jobs, environ, gpus_per_worker).get(place, {})


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def min_workers() -> int | None:
    """Number of workers with which the launcher says that training begins, or None."""
    text = os.environ.get(MIN_WORKERS_VARIABLE, "")
    if text and not text.isdecimal():
        raise ClusterConfigError(
            f"{MIN_WORKERS_VARIABLE} must be the number of workers with which training begins. "
            f"Received: {MIN_WORKERS_VARIABLE}={text!r}"
        )
    return int(text) if text else None


def python_path(environ: Mapping[str, str] | None = None) -> str:
    """Returns a PYTHONPATH under which tasks import the same keras_psplus, installed or not."""
    inherited = (os.environ if environ is None else environ).get("PYTHONPATH", "")
    root = str(pathlib.Path(__file__).resolve().parents[2])
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return inherited
    return os.pathsep.join(filter(None, [root, inherited]))


def _addresses(hosts: Sequence[str] | None, total: int) -> list[str]:
    if hosts is None:
        return [f"127.0.0.1:{port}" for port in free_ports(total)]
    if len(hosts) != total:
        raise ValueError(
            f"The cluster has {total} tasks and needs as many hosts (chief, workers, ps, in this "
            f"order). Received: hosts={','.join(hosts)} ({len(hosts)})"
        )
    addresses: list[str] = []
    used: set[str] = set()
    for host in hosts:
        address = host if has_port(host) else _next_address(host, used)
        if address in used:
            raise ValueError(
                f"Two tasks have the address {address!r}. Received: hosts={','.join(hosts)}"
            )
        used.add(address)
        addresses.append(address)
    return addresses


def _next_address(host: str, used: set[str]) -> str:
    ports = itertools.count(_DEFAULT_PORT)
    return next(address for port in ports if (address := f"{host}:{port}") not in used)


def has_port(host: str) -> bool:
    """Whether a host is named with a port behind it."""
    return host.rpartition("]")[2].count(":") == 1


def _gpus(
    counts: Mapping[str, int], environ: Mapping[str, str] | None, per_worker: int | None
) -> dict[tuple[str, int], dict[str, str]]:
    """Variables of each task that say which GPUs it sees; none on a machine without."""
    found = visible(environ)
    if not found and not per_worker:
        return {}
    trains = [("worker", index) for index in range(counts["worker"])]
    if counts["chief"] and counts["ps"] and per_worker is None:
        found = found[: max(1, len(trains))]  # ParameterServerStrategy takes one for each
    elif counts["chief"] and not counts["ps"] and len(found) > len(trains):
        trains.append(("chief", 0))  # under all-reduce, it is one of those that train
    seen = dict(zip(trains, split(found, len(trains), per_worker)))
    others = [("chief", 0), (EVALUATOR, 0), *(("ps", index) for index in range(counts["ps"]))]
    return {**{place: {VISIBLE: ""} for place in others}, **seen}


def _thread_split(compute_tasks: int, environ: Mapping[str, str] | None) -> dict[str, str]:
    environ = os.environ if environ is None else environ
    share = max(1, available_cores() // compute_tasks)
    split = {
        "OMP_NUM_THREADS": share,
        "TF_NUM_INTRAOP_THREADS": share,
        "TF_NUM_INTEROP_THREADS": max(_MIN_INTER_OP_THREADS, share),
    }
    return {name: str(threads) for name, threads in split.items() if name not in environ}
