"""Update that starts before all gradients have arrived, and reads of its results."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keras_psplus.core.jobs import background
from keras_psplus.parameter_server.tracing.losses import is_of_worker
from keras_psplus.parameter_server.tracing.remote import call, on_worker

if TYPE_CHECKING:
    from keras_psplus.parameter_server.overlap.sync_overlap import OverlapFunctions
    from keras_psplus.parameter_server.tracing.traffic import TrafficTotals

_LOOK_FOR_LOSSES_SECONDS = 0.5
# Of workers whose step is given up; what they read is read again.
_GIVE_UP_SECONDS = 5.0


class PipelinedUpdate:
    """An update that is under way from its making on.

    Args:
        overlapped: `OverlapFunctions`.
        stamp: Number of the attempt.
        count: How many gradients make it.
        scale: What their sum is multiplied by.
        readers: Numbers of the workers that bring the new values to their copies.
        totals: `TrafficTotals` that count what they bring.

    Attributes:
        readers: The same numbers, a list.
    """

    def __init__(
        self,
        overlapped: OverlapFunctions,
        stamp: int,
        count: int,
        scale: float,
        readers: Sequence[int],
        totals: TrafficTotals,
    ) -> None:
        self._overlapped, self._stamp, self._count = overlapped, stamp, count
        self._totals, self._can_undo = totals, False
        self.readers = list(readers)
        self._update = background.start(lambda: self._run(scale, len(readers)), "Update")
        self._fetches = {
            worker: background.start(functools.partial(self._fetch, worker), "Fetch")
            for worker in readers
        }

    def _run(self, scale: float, readers: int) -> None:
        self._overlapped.undo.keep()
        self._can_undo = True
        self._overlapped.apply(self._stamp, self._count, scale, readers)

    def _fetch(self, worker: int) -> None:
        fetch = self._overlapped.fetch
        with on_worker(worker, device=None):
            (counts,) = call(fetch.concrete)
        self._totals.add(fetch.costs, np.asarray(counts))

    def finish(self, lost_workers: Callable[[], Collection[int]]) -> set[int]:
        """Waits for its end; all gradients have been added.

        Args:
            lost_workers: Function that returns the numbers of workers that are not waited for.

        Returns:
            Numbers of the workers whose copies are those of this update.
        """
        try:
            self._update.result()
        except BaseException:
            self._undo()
            raise
        fresh = set()
        for worker, fetch in self._fetches.items():
            while not fetch.done() and worker not in lost_workers():
                concurrent.futures.wait([fetch], _LOOK_FOR_LOSSES_SECONDS)
            error = fetch.exception() if fetch.done() else None
            if error is not None and not is_of_worker(error):
                raise error
            if fetch.done() and error is None:
                fresh.add(worker)
        return fresh

    def abort(self) -> None:
        """Has all variables be as before; gradients may be missing."""
        self._overlapped.release(self._stamp, self._count)
        try:
            self._update.result()
        finally:
            concurrent.futures.wait(self._fetches.values(), _GIVE_UP_SECONDS)
            self._undo()

    def _undo(self) -> None:
        if self._can_undo:
            self._overlapped.undo.restore()
