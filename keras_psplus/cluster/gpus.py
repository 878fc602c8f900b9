"""GPUs of this machine, and those that each of its tasks sees."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
# TensorFlow otherwise reserves nearly all of a GPU's memory for the first process.
_GROWTH = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
_LIST_SECONDS = 20.0


def visible(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names of the GPUs that processes of this environment see, as `CUDA_VISIBLE_DEVICES` has them.

    TensorFlow is not asked, as it would begin to use them.

    Args:
        environ: Environment variables; `os.environ` by default.
    """
    found = named(environ)
    return [str(number) for number in range(_count())] if found is None else found


def named(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Names in `CUDA_VISIBLE_DEVICES`, or None if it is not set.

    Args:
        environ: Environment variables; `os.environ` by default.
    """
    environ = os.environ if environ is None else environ
    if VISIBLE not in environ:
        return None
    return [name.strip() for name in environ[VISIBLE].split(",") if name.strip()]


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

    Args:
        gpus: Names of the GPUs.
        per_worker: Number of GPUs of each; by default as many as there are for each.

    Returns:
        Dict of variables for each worker.

    Raises:
        ValueError: If there are not as many GPUs.

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
    """A sentence that says which GPUs tasks use; empty if none does.

    Args:
        tasks: Environment variables of each task, by its name.
    """
    names = {task: own[VISIBLE] for task, own in tasks.items() if own.get(VISIBLE)}
    if len(set(names.values())) == len(names):
        return "; ".join(f"{task} has GPU {name}" for task, name in names.items())
    shared = ", ".join(sorted(set(names.values())))
    return f"{len(names)} tasks share GPU {shared}, and each takes the memory that it needs"
