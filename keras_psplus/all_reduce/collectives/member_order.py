"""The order in which TensorFlow has the tasks of a group of collectives.

It is that of their names as text, in which task 10 comes before task 2; a rank is no place in it.
Rings go round in this order, and what is gathered or exchanged is in it. It cannot be chosen: what
a task asks of the one that forms groups says nothing of an order.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_psplus.cluster.config import TaskConfig


def names_of(task: TaskConfig, local: int) -> list[str]:
    """TensorFlow's names of the tasks of all replicas, in rank order.

    Args:
        task: One of the cluster, whose parameter servers have no replicas.
        local: Number of replicas of one worker.
    """
    workers = [(job, index) for job, index, _ in task.tasks() if job != "ps"]
    names = [f"/job:{job}/replica:0/task:{index}" for job, index in workers]
    return [name for name in names for _ in range(local)]


def ranks_by_place(names: Sequence[str]) -> list[int]:
    """The rank that stands at each place of TensorFlow's order.

    Args:
        names: As of `names_of`.

    Example:

    >>> ranks_by_place(["task:2", "task:9", "task:10"])
    [2, 0, 1]
    """
    # Several replicas of one task stay in their order.
    return sorted(range(len(names)), key=lambda rank: names[rank])


def places_by_rank(names: Sequence[str]) -> list[int]:
    """The place of each rank in TensorFlow's order: the inverse of `ranks_by_place`."""
    ranks = ranks_by_place(names)
    return sorted(range(len(ranks)), key=lambda place: ranks[place])
