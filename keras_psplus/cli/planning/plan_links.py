"""The links that `keras-psplus plan` plans for: a rate, a file of pairs, or measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from keras_psplus.cli.flags.parsing import UsageError
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.discovery.discovery import find_task_config
from keras_psplus.cluster.environment import python_path
from keras_psplus.planning import cost_model, links_file
from keras_psplus.planning.links_file import Links

MEASURED = "measured"
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")


class LinksError(Exception):
    """The links could not be measured; the message says why."""


def bits_per_second(text: str) -> float:
    """Reads a rate such as `"100mbit"`; raises `UsageError` if it is none."""
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else 0.0
    if not rate:
        raise UsageError(
            f"--link is `{MEASURED}`, or a rate such as 100mbit or 1gbit. Received: {text!r}"
        )
    return rate


def read(path: str, workers: int | None) -> Links:
    """Reads a file of links.

    Args:
        path: Its path.
        workers: What `--workers` says, or None.

    Raises:
        UsageError: If it cannot be used, or has another number of hosts.
    """
    try:
        links = links_file.read(path)
    except ValueError as error:
        raise UsageError(f"--links cannot be used: {error}") from None
    if workers is not None and workers != len(links.hosts):
        raise UsageError(
            f"--links has the links of {len(links.hosts)} hosts: leave out --workers, or measure "
            f"those of {workers}. Received: --workers={workers}, --links={path}"
        )
    return links


def cluster_to_measure(workers: int | None, ps: int | None) -> TaskConfig:
    """The cluster of this task, whose links are to be measured.

    Args:
        workers: What `--workers` says, or None.
        ps: What `--ps` says, or None.

    Raises:
        UsageError: If it has no two workers, or other numbers of tasks.
        ClusterConfigError: If TF_CONFIG is wrong.
    """
    task = find_task_config()
    if task is None or task.num_workers < 2 or task.task_type not in ("chief", "worker"):
        raise UsageError(
            f"--link {MEASURED} has to be started in each worker of a cluster, with its TF_CONFIG, "
            f"as `keras-psplus doctor --links`. Received: {task.name if task else 'no cluster'}"
        )
    for name, given, found in (("workers", workers, task.num_workers), ("ps", ps, task.num_ps)):
        if given not in (None, found):
            raise UsageError(
                f"the cluster has {found} {name}: leave out --{name}. Received: --{name}={given}"
            )
    return task


def measure() -> Links | None:
    """Measures the links of TF_CONFIG's cluster, on all workers at once.

    Returns:
        `Links` on the chief, None on the others.

    Raises:
        LinksError: If it failed.
    """
    # In a separate process: the servers of the cluster end with it.
    command = [sys.executable, "-m", "keras_psplus", "doctor", "--links", "--json"]
    env = {**os.environ, "PYTHONPATH": python_path()}
    result = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
    if result.returncode:
        raise LinksError(result.stderr.strip() or f"the measurement ended with {result.returncode}")
    if not result.stdout.strip():
        return None
    return links_file.parse(result.stdout, " ".join(command[1:]))


def links_of_cluster(links: Links) -> tuple[float, float]:
    """Bits per second and milliseconds of delay, as `cost_model.Cluster` has them.

    A ring is as slow as its slowest link. Of a short message's time, the model counts what tasks
    take for it by itself.
    """
    slowest = links.slowest_of_ring
    return slowest.bits_per_second, max(0.0, slowest.latency_ms - cost_model.MESSAGE_MS)
