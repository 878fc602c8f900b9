"""The processes of a Slurm job step, by the variables that `srun` sets.

Reference: https://slurm.schedmd.com/srun.html, "Output environment variables". Of a heterogeneous
step, `SLURM_STEP_NODELIST` and `SLURM_STEP_TASKS_PER_NODE` have all components.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.discovery.ranks import Ranks, number, per_host, port_of_job
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE

NAME = "slurm"


def read(environ: Mapping[str, str]) -> Ranks | None:
    """Reads Slurm's variables; None outside of a job step, and for a single process.

    A single process may join a job of a range of workers, whose steps have the ports of step 0.

    Raises:
        ClusterConfigError: If they do not describe the step.
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
