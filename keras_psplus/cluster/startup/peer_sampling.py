"""Peers that a task contacts in a large cluster, instead of all others."""

from collections.abc import Sequence
from typing import TypeVar

_Task = TypeVar("_Task")

# Up to so many tasks, every one asks every other: it costs little, and each can name all.
EVERYBODY = 32


def is_large(count: int) -> bool:
    """Whether a cluster is so large that each task contacts its neighbours only."""
    return count > EVERYBODY


def neighbours(tasks: Sequence[_Task], own: int) -> list[_Task]:
    """The tasks that one of them asks.

    In a large cluster, these are the ones that follow it at distances of 1, 2, 4 and so on, and the
    one before it, as in a ring: each task is asked by as many as it asks, and what one of them has
    found can be with all in as many rounds.

    Args:
        tasks: All tasks, in the order of their ranks.
        own: Rank of the one that asks.

    Returns:
        List of some of `tasks`, in order, without its own.

    Example:

    ```python
    neighbours(range(64), 0)  # [1, 2, 4, 8, 16, 32, 63]
    ```

    Reference: Stoica et al., "Chord: A Scalable Peer-to-peer Lookup Service for Internet
    Applications", SIGCOMM 2001 (fingers at powers of two).
    """
    count = len(tasks)
    if not is_large(count):
        return [task for rank, task in enumerate(tasks) if rank != own]
    distances = [-1] + [1 << power for power in range((count - 1).bit_length())]
    ranks = {(own + distance) % count for distance in distances} - {own}
    return [tasks[rank] for rank in sorted(ranks)]
