"""Synchronization modes of workers' steps: `mode` and its further arguments."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from keras_psplus.arguments import MOST, shown
from keras_psplus.cluster.launcher import launch_flags
from keras_psplus.updates import Updates


class Mode(NamedTuple):
    """The checked arguments.

    Attributes:
        is_sync: Whether workers take each step together.
        backup_workers: How many workers' gradients a step does without.
        max_staleness: How many steps a worker may be ahead of the slowest one, or None.
    """

    is_sync: bool
    backup_workers: int
    max_staleness: int | None

    @property
    def bound(self) -> float:
        """Maximum number of steps that a worker is ahead of the slowest one."""
        return math.inf if self.max_staleness is None else self.max_staleness

    def window(self, overlaps: bool) -> int:
        """Maximum number of steps under way on a worker: reading, computing and sending."""
        return 3 if overlaps and not self.is_sync else 1

    def check_workers(self, num_workers: int) -> None:
        """Raises ValueError if there are not more workers than backup workers."""
        if self.backup_workers >= num_workers:
            raise ValueError(
                "`backup_workers` must be an integer from 0 to one less than the number of "
                f"workers: every step needs a gradient. Received: "
                f"backup_workers={self.backup_workers}, for {num_workers} worker(s)"
            )


def check_mode(mode: str, backup_workers: int, max_staleness: int | None) -> Mode:
    """Checks arguments; raises ValueError if one is out of range or meaningless."""
    if not isinstance(mode, str) or mode not in ("async", "sync"):
        raise ValueError(f'`mode` must be "async" or "sync". Received: mode={shown(mode)}')
    if not _is_count(backup_workers):
        raise ValueError(
            "`backup_workers` must be an integer from 0 to one less than the number of workers. "
            f"Received: backup_workers={shown(backup_workers)}"
        )
    if max_staleness is not None and not _is_count(max_staleness):
        raise ValueError(
            "`max_staleness` must be None or an integer of at least 0. "
            f"Received: max_staleness={shown(max_staleness)}"
        )
    if backup_workers and mode != "sync":
        raise ValueError(
            "`backup_workers` has a meaning in synchronous training only, where a step waits for "
            'gradients: pass `mode="sync"`, or 0. '
            f"Received: backup_workers={backup_workers!r}, mode={shown(mode)}"
        )
    if max_staleness is not None and mode != "async":
        raise ValueError(
            "`max_staleness` has a meaning in asynchronous training only: synchronous steps are "
            'never stale. Pass `mode="async"`, or None. '
            f"Received: max_staleness={max_staleness!r}, mode={shown(mode)}"
        )
    return Mode(mode == "sync", backup_workers, max_staleness)


def check_updates(updates: Updates | None, mode: Mode) -> Updates | None:
    """Raises ValueError if a way of updating has no meaning, else returns it."""
    if updates is None:
        return None
    if not updates.on_parameter_servers:
        raise ValueError(
            "Under parameter servers, `updates` must be `keras_psplus.updates.Accumulate(steps)`, "
            "`LocalSGD(every)`, or None: workers come one by one, so there is no mean of theirs "
            f"for an outer optimizer to step along. Received: updates={updates!r}"
        )
    if mode.is_sync:
        raise ValueError(
            "`updates` has a meaning in asynchronous training only, where each worker updates by "
            'itself: pass `mode="async"`, give the optimizer `gradient_accumulation_steps`, or '
            f'take `MultiWorkerMirroredStrategy`. Received: updates={updates!r}, mode="sync"'
        )
    if mode.max_staleness is not None:
        raise ValueError(
            "`updates` has a meaning without `max_staleness` only: what workers keep back has no "
            "bound on its age. Pass `max_staleness=None`. "
            f"Received: updates={updates!r}, max_staleness={mode.max_staleness!r}"
        )
    return updates


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def check_overlap(overlap_steps: bool | str, mode: Mode, updates: Updates | None) -> bool | None:
    """Checks `overlap_steps`; returns a bool, or None if the first steps are to show it.

    Raises:
        ValueError: If it is neither a bool nor "auto", or another argument rules it out.
    """
    is_ruled_out = mode.backup_workers or updates is not None
    if isinstance(overlap_steps, str) and overlap_steps == "auto":
        # Asynchronous steps that overlap are less accurate.
        return None if mode.is_sync and not is_ruled_out else False
    if not isinstance(overlap_steps, (bool, np.bool_)):
        raise ValueError(
            '`overlap_steps` must be "auto", True or False. '
            f"Received: overlap_steps={shown(overlap_steps)}"
        )
    if overlap_steps and is_ruled_out:
        raise ValueError(
            "`overlap_steps` goes without `backup_workers`, whose late workers would have to read "
            "every update before the next step, and without `updates`, with which a worker's step "
            "goes on from what its step before has left. Leave one of them out. "
            f"Received: overlap_steps={overlap_steps}, backup_workers={mode.backup_workers}, "
            f"updates={updates!r}"
        )
    return bool(overlap_steps)


def check_min_workers(min_workers: int | None, mode: Mode, num_workers: int) -> int:
    """Checks with how many workers training begins; None for the launcher's number, or all.

    Raises:
        ValueError: If it is out of its range, or there are not more than backup workers.
    """
    least = launch_flags.min_workers() if min_workers is None else min_workers
    if least is None:
        return num_workers
    if not _is_count(least) or not 1 <= least <= num_workers:
        raise ValueError(
            "`min_workers` must be an integer from 1 to the number of workers of the cluster. "
            f"Received: min_workers={shown(least)}, for {num_workers} worker(s)"
        )
    mode.check_workers(least)
    return least


def check_no_min_workers(min_workers: int | None) -> None:
    """Raises ValueError if workers are to come to servers that were started otherwise."""
    if min_workers is not None:
        raise ValueError(
            "`min_workers` needs tasks that this library starts: leave out `cluster_resolver`, and "
            f"set TF_CONFIG in all tasks. Received: min_workers={shown(min_workers)}"
        )
