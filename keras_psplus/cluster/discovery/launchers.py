"""Launchers: ranks of a job's processes, from the variables that each sets, and their tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel import JobSecret
from keras_psplus.cluster.config import (
    EVALUATOR,
    JOB_TYPES,
    ClusterConfigError,
    TaskConfig,
    split_address,
)
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE
from keras_psplus.cluster.handshake import Listener, PeerIdentity
from keras_psplus.log import logger

# Ranks and number of processes, read from a launcher's environment variables.


# For launchers that say nothing of hosts.
HOSTS_VARIABLE = "KERAS_PSPLUS_HOSTS"
PORT_VARIABLE = "KERAS_PSPLUS_PORT"
# Of a job that others may join: the rank of the first process that is started together with this.
FIRST_RANK_VARIABLE = "KERAS_PSPLUS_FIRST_RANK"
# Below the ports that connections get, also those of control channels: 1,216 blocks of 16.
_FIRST_PORT, _BLOCK, _BLOCKS = 12_288, 16, 1_216


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The processes of a job.

    Args:
        source: What says so, for people: `"Slurm (job 12, step 0)"`.
        size: Number of processes.
        hosts: Host of each rank, or None if the launcher does not say.
        port: Port of the first process on each host; the next have the following ones.
        local_size: Number of processes on this host, or None if the launcher does not say.
        first_host: Host of the first process, if the launcher says that alone.
    """

    source: str
    rank: int
    size: int
    hosts: tuple[str, ...] | None
    port: int
    local_size: int | None = None
    first_host: str | None = None

    def addresses(self, environ: Mapping[str, str], timeout: float = 300.0) -> list[str]:
        """Returns the `host:port` of each rank.

        Args:
            environ: The environment: `KERAS_PSPLUS_HOSTS` and `KERAS_PSPLUS_PORT` count more than
                what the launcher says.
            timeout: Seconds to wait for the others, where processes tell each other their hosts.
        """
        text = environ.get(PORT_VARIABLE, "")
        port = number(PORT_VARIABLE, text, 1, 65_535) if text else self.port
        hosts = self._hosts(environ, port, timeout)
        seen: dict[str, int] = {}
        addresses = []
        for host in hosts:
            seen[host] = seen.get(host, -1) + 1
            addresses.append(f"{_bracketed(host)}:{port + seen[host]}")
        if port + max(seen.values()) > 65_535:
            raise ClusterConfigError(
                f"The ports of {max(seen.values()) + 1} processes on a host begin at {port} and "
                f"would end above 65535. Set {PORT_VARIABLE} to a lower one. Received: {port}"
            )
        return addresses

    def within(self, size: int, environ: Mapping[str, str]) -> Ranks:
        """Returns these processes' ranks in a job that others may join."""
        if not environ.get(MIN_WORKERS_VARIABLE) or size <= self.size:
            return self
        text = environ.get(FIRST_RANK_VARIABLE) or "0"
        first = number(FIRST_RANK_VARIABLE, text, 0, size - self.size)
        # The others' hosts are not those of this start alone.
        unknown: dict[str, Any] = {"hosts": None, "local_size": None, "first_host": None}
        return dataclasses.replace(self, rank=first + self.rank, size=size, **unknown)

    def _hosts(self, environ: Mapping[str, str], port: int, timeout: float) -> Sequence[str]:
        text = environ.get(HOSTS_VARIABLE, "")
        if text:
            hosts = [_host(host.strip(), text) for host in text.split(",")]
            if not all(hosts) or self.size % len(hosts):
                raise ClusterConfigError(
                    f"{HOSTS_VARIABLE} must name one host for each of the {self.size} processes, "
                    f"or one for each as many of them. Received: {HOSTS_VARIABLE}={text}"
                )
            each = self.size // len(hosts)
            return [host for host in hosts for _ in range(each)]
        if self.hosts is not None:
            return self.hosts
        if self.local_size == self.size:
            return ["127.0.0.1"] * self.size
        if self.first_host is not None:
            address = f"{_bracketed(self.first_host)}:{port}"
            return exchange_hosts(self.rank, self.size, address, timeout)
        raise ClusterConfigError(
            f"{self.source} says that this is process {self.rank} of {self.size}, but not on which "
            f"hosts the others are. Set {HOSTS_VARIABLE} to the hosts, in the order of the ranks, "
            "such as host1,host2 in every process; or set TF_CONFIG. "
            f"Received: {self.source} without {HOSTS_VARIABLE}"
        )


def _host(host: str, text: str) -> str:
    """One of the hosts that a user names, without brackets."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if ":" in bare:
            ipaddress.IPv6Address(bare)
        elif host:
            split_address(f"{host}:1")
    except ValueError:
        raise ClusterConfigError(
            f"{HOSTS_VARIABLE} must name hosts without ports, such as host1,host2: each process "
            f"has a port of its own, from {PORT_VARIABLE} up. {host!r} is no host. "
            f"Received: {HOSTS_VARIABLE}={text}"
        ) from None
    return bare


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def number(name: str, text: str, least: int, most: int | None = None) -> int:
    """Returns the value of an environment variable as an int."""
    good = text.strip().isascii() and text.strip().isdigit() and int(text) >= least
    if not good or (most is not None and int(text) > most):
        allowed = f"from {least} up" if most is None else f"from {least} to {most}"
        raise ClusterConfigError(
            f"{name} must be a whole number {allowed}. Received: {name}={text!r}"
        )
    return int(text)


def read_pair(
    environ: Mapping[str, str], rank: str, size: str, launcher: str
) -> tuple[int, int] | None:
    """Reads a rank and the number of ranks; None if neither is set."""
    given = {name: environ.get(name, "").strip() for name in (rank, size)}
    if not any(given.values()):
        return None
    for name, other in ((rank, size), (size, rank)):
        if not given[name]:
            raise ClusterConfigError(
                f"{other} is set, but {name} is not: {launcher} sets both. Start every process by "
                f"it, unset {other}, or set TF_CONFIG. Received: {other}={given[other]}"
            )
    count = number(size, given[size], 1)
    return number(rank, given[rank], 0, count - 1), count


def port_of_job(*numbers: int) -> int:
    """Port for a job's first process on a host, which differs between jobs.

    Args:
        *numbers: Whole numbers that name the job and its part. Two jobs whose last numbers differ
            by less than 1,216 have different blocks of 16 ports.
    """
    number = 0
    for one in numbers:
        number = 521 * number + one
    return _FIRST_PORT + _BLOCK * (number % _BLOCKS)


def per_host(counts: Sequence[int], hosts: Sequence[str], cyclic: bool) -> tuple[str, ...]:
    """Returns the host of each rank."""
    if not cyclic:
        return tuple(host for host, count in zip(hosts, counts) for _ in range(count))
    return tuple(
        host for turn in range(max(counts)) for host, count in zip(hosts, counts) if turn < count
    )


# Assignment of a job's ranks to chief, workers and parameter servers.

LAYOUT_VARIABLE = "KERAS_PSPLUS_LAYOUT"
_EXAMPLE = "chief:1,worker:4,ps:2"


def parse(text: str) -> dict[str, int]:
    """Reads a layout.

    Args:
        text: Numbers of tasks by job type, such as `"chief:1,worker:4,ps:2"`. The first ranks are
            those of the first job type that is named, and so on.

    Returns:
        Dict from job types to numbers of tasks, in the order of the text.

    Example:

    ```python
    parse("worker:4,ps:2")  # {"worker": 4, "ps": 2}
    ```
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        job, colon, count = (piece.strip() for piece in part.partition(":"))
        if job not in (*JOB_TYPES, EVALUATOR):
            raise _wrong(text, f"{job!r} is none of {', '.join((*JOB_TYPES, EVALUATOR))}")
        if job in counts:
            raise _wrong(text, f"{job!r} is named twice")
        if not colon or not (count.isascii() and count.isdigit()) or int(count) < 1:
            raise _wrong(text, f"the number of {job!r} tasks must be a whole number from 1 up")
        counts[job] = int(count)
    if not {"chief", "worker"} & set(counts):
        raise _wrong(text, "it has neither a chief nor a worker: nothing would train")
    for job in ("chief", EVALUATOR):
        if counts.get(job, 1) > 1:
            raise _wrong(text, f"a cluster has at most one {job}")
    return counts


def text_of(counts: dict[str, int]) -> str:
    """Formats a layout as a text for `parse`, without job types that have no tasks."""
    return ",".join(f"{job}:{count}" for job, count in counts.items() if count)


def task_config(counts: dict[str, int], addresses: list[str], rank: int) -> TaskConfig:
    """Returns what a rank of a job is."""
    if sum(counts.values()) != len(addresses):
        raise ClusterConfigError(
            f"The layout has {sum(counts.values())} tasks, but the job has {len(addresses)} "
            f"processes. Start as many, or change {LAYOUT_VARIABLE} (`keras-psplus exec --ps N`). "
            f"Received: {LAYOUT_VARIABLE}={text_of(counts)}"
        )
    jobs: list[tuple[str, int]] = []
    cluster: dict[str, tuple[str, ...]] = {}
    for job, count in counts.items():
        if job != EVALUATOR:
            cluster[job] = tuple(addresses[len(jobs) : len(jobs) + count])
        jobs += [(job, index) for index in range(count)]
    return TaskConfig({job: cluster[job] for job in JOB_TYPES if job in cluster}, *jobs[rank])


def _wrong(text: str, reason: str) -> ClusterConfigError:
    return ClusterConfigError(
        f"{LAYOUT_VARIABLE} cannot be used: {reason}. It should look like {_EXAMPLE}. "
        f"Received: {LAYOUT_VARIABLE}={text}"
    )


# Pods of an Indexed Job or of a JobSet, from the variables that Kubernetes sets.
#
# Reference: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/. Pods of an
# Indexed Job with a headless service are `JOB-INDEX.SUBDOMAIN`. Pods do not know their number:
# `KERAS_PSPLUS_LAYOUT` has it. In a JobSet (https://jobset.sigs.k8s.io/docs/concepts/) each kind of
# task is an Indexed Job, which `KERAS_PSPLUS_ROLE` names; pods are `JOBSET-ROLE-0-INDEX.SUBDOMAIN`.

KUBERNETES = "kubernetes"
SUBDOMAIN_VARIABLE = "KERAS_PSPLUS_SUBDOMAIN"
ROLE_VARIABLE = "KERAS_PSPLUS_ROLE"
_INDEX = "JOB_COMPLETION_INDEX"
_PORT = 2222


def read_kubernetes(environ: Mapping[str, str]) -> Ranks | None:
    """Reads an Indexed Job's variables; None outside of one, and for a single pod."""
    if _INDEX not in environ:
        return None
    index = number(_INDEX, environ[_INDEX], 0)
    if not environ.get(LAYOUT_VARIABLE):
        raise ClusterConfigError(
            f"This is pod {index} of a Kubernetes Indexed Job, but Kubernetes does not say how "
            f"many pods form the cluster. Set {LAYOUT_VARIABLE} in the pod template, such as "
            "worker:4 for four workers; or KERAS_PSPLUS_CLUSTER=none if each pod is to train "
            f"alone. Received: {_INDEX}={index}"
        )
    counts = parse(environ[LAYOUT_VARIABLE])
    size = sum(counts.values())
    if environ.get(ROLE_VARIABLE):
        return _of_jobset(environ, index, counts)
    if index >= size:
        raise ClusterConfigError(
            f"This is pod {index} of a Kubernetes Indexed Job, but the layout has {size} tasks. "
            f"Set the Job's `completions` and `parallelism` to {size}, or change {LAYOUT_VARIABLE}."
            f" Received: {_INDEX}={index}, {LAYOUT_VARIABLE}={environ[LAYOUT_VARIABLE]}"
        )
    if size == 1:
        return None
    hosts = None
    if not environ.get(HOSTS_VARIABLE):
        prefix, subdomain = _names(environ, "", index)
        hosts = tuple(f"{prefix}-{i}.{subdomain}" for i in range(size))
    return Ranks(f"Kubernetes (Indexed Job, index {index})", index, size, hosts, _PORT)


def _of_jobset(environ: Mapping[str, str], index: int, counts: dict[str, int]) -> Ranks | None:
    role = environ[ROLE_VARIABLE]
    if index >= counts.get(role, 0):
        raise ClusterConfigError(
            f"This is pod {index} of the {role} tasks of a JobSet, but the layout has "
            f"{counts.get(role, 0)} of them. Set each Job's `completions` and `parallelism` to the "
            f"numbers of {LAYOUT_VARIABLE}. Received: {_INDEX}={index}, {ROLE_VARIABLE}={role}, "
            f"{LAYOUT_VARIABLE}={environ[LAYOUT_VARIABLE]}"
        )
    size, jobs = sum(counts.values()), list(counts)
    if size == 1:
        return None
    hosts = None
    if not environ.get(HOSTS_VARIABLE):
        prefix, subdomain = _names(environ, f"-{role}-0", index)
        hosts = tuple(
            f"{prefix}-{job}-0-{i}.{subdomain}" for job in jobs for i in range(counts[job])
        )
    rank = sum(counts[job] for job in jobs[: jobs.index(role)]) + index
    return Ranks(f"Kubernetes (JobSet, {role}-{index})", rank, size, hosts, _PORT)


def _names(environ: Mapping[str, str], of_job: str, index: int) -> tuple[str, str]:
    name = environ.get("HOSTNAME") or socket.gethostname()
    ending = f"{of_job}-{index}"
    prefix = name.partition(".")[0].removesuffix(ending)
    if not prefix or prefix == name.partition(".")[0]:
        raise ClusterConfigError(
            f"The pod's host name does not end with {ending}, so the others' names are not known. "
            f"Leave `hostname` out of the pod template, or set {HOSTS_VARIABLE}. "
            f"Received: HOSTNAME={name}, {_INDEX}={index}"
        )
    subdomain = environ.get(SUBDOMAIN_VARIABLE) or socket.getfqdn(name).partition(".")[2]
    if not subdomain:
        raise ClusterConfigError(
            "The pods have no subdomain, so they cannot find each other by name. Make a headless "
            f"service, and set `subdomain` in the pod template, or {SUBDOMAIN_VARIABLE}, to its "
            f"name. Received: HOSTNAME={name} without a subdomain"
        )
    return prefix, subdomain


# The processes of a Slurm job step, by the variables that `srun` sets.
#
# Reference: https://slurm.schedmd.com/srun.html, "Output environment variables". Of a heterogeneous
# step, `SLURM_STEP_NODELIST` and `SLURM_STEP_TASKS_PER_NODE` have all components.

SLURM = "slurm"


def read_slurm(environ: Mapping[str, str]) -> Ranks | None:
    """Reads Slurm's variables; None outside of a job step, and for a single process.

    A single process may join a job of a range of workers, whose steps have the ports of step 0.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    size = number("SLURM_STEP_NUM_TASKS", environ["SLURM_STEP_NUM_TASKS"], 1)
    may_join = bool(environ.get(MIN_WORKERS_VARIABLE))
    if size == 1 and not may_join and not environ.get("SLURM_STEP_NODELIST"):
        return None
    rank = number("SLURM_PROCID", environ.get("SLURM_PROCID", ""), 0, size - 1)
    job = number("SLURM_JOB_ID", environ.get("SLURM_JOB_ID", ""), 0)
    step = number("SLURM_STEP_ID", environ.get("SLURM_STEP_ID", ""), 0)
    if size == 1 and not may_join:
        return None
    return Ranks(
        f"Slurm (job {job}, step {step})",
        rank,
        size,
        # Without the nodes, as in a container that passes some variables on, the user has to say.
        _hosts(environ, rank, size) if environ.get("SLURM_STEP_NODELIST") else None,
        port_of_job(0 if may_join else step, job),
    )


def processes_outside_of_a_step(environ: Mapping[str, str]) -> int:
    """Number of tasks of a job in whose batch script or shell this process runs.

    They are not started there: `srun` starts them. 0 outside of Slurm, and in a job step.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_STEP_NUM_TASKS" in environ:
        return 0
    text = environ.get("SLURM_NTASKS", "")
    return int(text) if text.isdigit() else 0


def _hosts(environ: Mapping[str, str], rank: int, size: int) -> tuple[str, ...]:
    nodes = _expanded(environ["SLURM_STEP_NODELIST"])
    counts = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(counts) != len(nodes) or sum(counts) != size:
        raise ClusterConfigError(
            "Slurm's variables do not go together: SLURM_STEP_TASKS_PER_NODE does not divide "
            "SLURM_STEP_NUM_TASKS processes among the nodes of SLURM_STEP_NODELIST. Set TF_CONFIG "
            f"instead. Received: {_shown(environ)}"
        )
    # As `block:cyclic,Pack`: of nodes, of sockets, and options.
    way = re.split("[:,]", environ.get("SLURM_DISTRIBUTION", ""))[0] or "block"
    if way in ("block", "cyclic"):
        hosts = per_host(counts, nodes, way == "cyclic")
        if _is_mine(environ, hosts, rank):
            return hosts
    raise ClusterConfigError(
        "Slurm has distributed its tasks in another way than by blocks of ranks or round the "
        "nodes. Pass `--distribution=block` to srun, or set TF_CONFIG. "
        f"Received: {_shown(environ)}"
    )


def _is_mine(environ: Mapping[str, str], hosts: Sequence[str], rank: int) -> bool:
    """Whether this process's node and its number there are what an order of hosts says."""
    node, local = environ.get("SLURMD_NODENAME"), environ.get("SLURM_LOCALID")
    fits = node is None or hosts[rank] == node
    return fits and (local is None or hosts[:rank].count(hosts[rank]) == int(local))


def _expanded(nodes: str) -> list[str]:
    """The names of a list of nodes, `"n[1-2],gpu1"`."""
    if "[" not in nodes:
        return nodes.split(",")
    scontrol = shutil.which("scontrol")
    if scontrol is not None:
        # It asks no server.
        ran = subprocess.run(
            [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, timeout=30
        )
        if ran.returncode == 0 and ran.stdout.split():
            return ran.stdout.split()
    # In a container, say; not above, as it imports TensorFlow.
    from keras_psplus.tf_internals import slurm_cluster_resolver

    hosts: list[str] = slurm_cluster_resolver.expand_hostlist(nodes)
    return hosts


def _tasks_per_node(text: str) -> list[int]:
    """Numbers of tasks, of `"2(x3),1"`."""
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _shown(environ: Mapping[str, str]) -> str:
    names = [f"SLURM_STEP_{name}" for name in ("NODELIST", "NUM_TASKS", "TASKS_PER_NODE")]
    names += ["SLURM_DISTRIBUTION", "SLURM_PROCID", "SLURM_LOCALID", "SLURMD_NODENAME"]
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)


# Launchers that set a rank and a number of ranks: torchrun and MPI.
#
# They do not give every process the others' hosts, which MPI and `torch.distributed` exchange
# themselves. Processes on one host need none; otherwise `KERAS_PSPLUS_HOSTS` lists the hosts, or
# under torchrun the processes contact the first one, at MASTER_ADDR (`exchange_hosts`).

TORCHRUN, MPI = "torchrun", "mpi"
_MPI = (
    # Rank, size, local size, name of the job; launcher.
    (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("PMIX_NAMESPACE", "Open MPI's mpirun"),
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "PMI_ID", "mpiexec (PMI)"),
)


def read_torchrun(environ: Mapping[str, str]) -> Ranks | None:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them."""
    pair = read_pair(environ, "RANK", "WORLD_SIZE", "torchrun")
    if pair is None or pair[1] == 1:
        return None
    # The port itself is the launcher's.
    port = number("MASTER_PORT", environ.get("MASTER_PORT", "29500"), 1, 65_534) + 1
    hosts, local = None, _local_size(environ, "LOCAL_WORLD_SIZE")
    first = environ.get("MASTER_ADDR") or None
    if local == pair[1] and first:
        hosts = (first,) * pair[1]
    return Ranks("RANK and WORLD_SIZE (torchrun)", *pair, hosts, port, local, first)


def read_mpi(environ: Mapping[str, str]) -> Ranks | None:
    """Reads what Open MPI's `mpirun`, or a launcher that speaks PMI, has set."""
    for rank, size, local, name, launcher in _MPI:
        pair = read_pair(environ, rank, size, launcher)
        if pair is not None and pair[1] > 1:
            # Names differ from job to job.
            job = zlib.crc32(environ.get(name, "").encode())
            port = port_of_job(job)
            return Ranks(launcher, *pair, None, port, _local_size(environ, local))
    return None


def _local_size(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return number(name, text, 1) if text else None


# Rendezvous: processes exchange their hosts if they know the first one's only.
#
# The others connect to the first process, at the address that it will have in the cluster, with the
# handshake of tasks before TensorFlow starts (`handshake`); it reads their hosts from the
# connections, and answers with all hosts once it knows them. Callers that do not know the job's
# secret are ignored.

_PAUSE, _LOG_EVERY = 0.3, 10.0
# For those that were told, to say that they have heard it.
_COURTESY = 10.0


def exchange_hosts(rank: int, size: int, address: str, timeout: float) -> tuple[str, ...]:
    """Returns the host of each rank; all ranks have to call this at once.

    Args:
        address: `host:port` of the first one. It listens there until all know.
    """
    mine = PeerIdentity(
        _name(rank), "", socket.gethostname(), os.getpid(), f"{os.getpid()}-{time.monotonic_ns()}"
    )
    # Without a token, what only processes of this job are likely to know together.
    job = JobSecret.of_text(f"rendezvous of {size} at {address}")
    wait = _Wait(rank, size, address, timeout)
    return _lead(mine, job, size, address, wait) if rank == 0 else _follow(mine, job, address, wait)


def _lead(
    mine: PeerIdentity, job: JobSecret, size: int, address: str, wait: _Wait
) -> tuple[str, ...]:
    host, port = split_address(address)
    try:
        listener = Listener(port, mine, job)
    except OSError:
        raise wait.error(f"{_name(0)} cannot listen on port {port}") from None
    others = [_name(rank) for rank in range(1, size)]
    try:
        while missing := [name for name in others if name not in listener.callers_from]:
            wait.pause(
                listener.changed.wait, f"{', '.join(missing)} to call{listener.note_of_strangers()}"
            )
            listener.changed.clear()
        hosts = (host, *(listener.callers_from[name] for name in others))
        listener.identity = dataclasses.replace(mine, cluster=",".join(hosts), all_here=True)
        deadline = time.monotonic() + _COURTESY
        told = {f"{name}, told" for name in others}
        while told - listener.callers and time.monotonic() < deadline:
            listener.changed.wait(_PAUSE)
            listener.changed.clear()
    finally:
        listener.close()
    return hosts


def _follow(mine: PeerIdentity, job: JobSecret, address: str, wait: _Wait) -> tuple[str, ...]:
    while True:
        reason = "another server answers there"
        try:
            theirs = handshake.dial(address, mine, job)
            if theirs is not None and not theirs.is_proven:
                reason = str(handshake.StrangerError())
            elif theirs is not None and theirs.task == _name(0):
                if theirs.all_here:
                    break
                reason = "it waits for others"
        except OSError as error:
            reason = str(error)
        wait.pause(time.sleep, f"{_name(0)} at {address}: {reason}")
    with contextlib.suppress(OSError):
        handshake.dial(address, dataclasses.replace(mine, task=f"{mine.task}, told"), job)
    return tuple(theirs.cluster.split(","))


class _Wait:
    """Timeout of a rendezvous, and its log messages."""

    def __init__(self, rank: int, size: int, address: str, timeout: float) -> None:
        self._who, self._address = f"{_name(rank)} of {size}", address
        self._began, self._timeout = time.monotonic(), timeout
        self._next_log = self._began + _LOG_EVERY

    def pause(self, pause: Callable[[float], object], what: str) -> None:
        now = time.monotonic()
        if now - self._began >= self._timeout:
            raise self.error(f"waited {self._timeout:g} s for {what}")
        if now >= self._next_log:
            self._next_log += _LOG_EVERY
            logger.info("%s waits for %s", self._who, what)
        pause(_PAUSE)

    def error(self, reason: str) -> ClusterConfigError:
        return ClusterConfigError(
            f"{self._who} could not learn the hosts of the others: {reason}. Start all processes, "
            "see that all hosts reach that address (MASTER_ADDR, and the port after MASTER_PORT), "
            f"or set KERAS_PSPLUS_HOSTS or TF_CONFIG. Received: {self._address}"
        )


def _name(rank: int) -> str:
    return f"rank {rank}"
