"""Assignment of a job's ranks to chief, workers and parameter servers."""

from __future__ import annotations

from keras_psplus.cluster.config import EVALUATOR, JOB_TYPES, ClusterConfigError, TaskConfig

LAYOUT_VARIABLE = "KERAS_PSPLUS_LAYOUT"
_EXAMPLE = "chief:1,worker:4,ps:2"


def parse(text: str) -> dict[str, int]:
    """Reads a layout.

    Args:
        text: Numbers of tasks by job type, such as `"chief:1,worker:4,ps:2"`. The first ranks are
            those of the first job type that is named, and so on.

    Returns:
        Dict from job types to numbers of tasks, in the order of the text.

    Raises:
        ClusterConfigError: If the text has another form.

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
    """Returns what a rank of a job is.

    Args:
        counts: What `parse` returns.
        addresses: `host:port` of each rank.

    Raises:
        ClusterConfigError: If the layout has more tasks or fewer than the job has ranks.
    """
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
