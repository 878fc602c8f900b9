"""Updates of synchronous steps, with a window of one step, or of two that overlap.

    window 1   | gradients of all workers | update |
    window 2   | gradients of all workers |
               |        update, and workers' reads of it |    `sync.overlap` has its steps

The update is the same. With a window of two it starts before the gradients if workers have copies
of what the last one made, keeps what it overwrites, and ends with new copies.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from keras_psplus.core.base import threads
from keras_psplus.log import warn_once
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.sync.overlap import SyncFunction
from keras_psplus.parameter_server.sync.sync_functions import SyncFunctions
from keras_psplus.parameter_server.tracing.losses import is_of_worker
from keras_psplus.parameter_server.tracing.remote import call, on_worker
from keras_psplus.parameter_server.tracing.traffic import TrafficTotals
from keras_psplus.parameter_server.tracing.worker_function import writes

_LOOK_FOR_LOSSES_SECONDS = 0.5
# Of workers whose step is given up; what they read is read again.
_GIVE_UP_SECONDS = 5.0


class StepUpdate:
    """The update of one attempt at a step.

    Args:
        readers: Numbers of the workers that bring the new values to their copies.

    Attributes:
        is_early: Whether it started before all gradients were there: workers compute on copies.
    """

    def __init__(
        self, function: SyncFunction, stamp: int, readers: Sequence[int], totals: TrafficTotals
    ) -> None:
        self.function, self.readers, self.is_early = function, readers, False
        self._overlap: Any = function.overlap
        self._stamp, self._totals, self._can_undo = stamp, totals, False
        self._update: concurrent.futures.Future[None] | None = None
        self._fetches: dict[int, concurrent.futures.Future[None]] = {}

    def start(self, count: int, scale: float) -> None:
        """Starts it, for so many gradients, whose sum is multiplied by a factor."""
        self._count = count
        if self._overlap is None:
            # Nothing else happens meanwhile.
            self._run(scale)
            return
        self._update = threads.start(lambda: self._run(scale), "Update")
        self._fetches = {
            worker: threads.start(functools.partial(self._fetch, worker), "Fetch")
            for worker in self.readers
        }

    def _run(self, scale: float) -> None:
        if self._overlap is not None:
            self._overlap.undo.keep()
            self._can_undo = True
        self.function.apply(self._stamp, self._count, scale, len(self.readers))

    def _fetch(self, worker: int) -> None:
        fetch = self._overlap.fetch
        with on_worker(worker, device=None):
            (counts,) = call(fetch.concrete)
        self._totals.add(fetch.costs, np.asarray(counts))

    def finish(self, lost_workers: Callable[[], Collection[int]]) -> set[int]:
        """Waits for its end, but not for lost workers; all gradients have been added.

        Returns:
            Numbers of the workers whose copies are those of this update.
        """
        try:
            self._join()
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
        self._overlap.release(self._stamp, self._count)
        try:
            self._join()
        finally:
            concurrent.futures.wait(self._fetches.values(), _GIVE_UP_SECONDS)
            self._undo()

    def _join(self) -> None:
        if self._update is not None:
            self._update.result()

    def _undo(self) -> None:
        if self._can_undo:
            self._overlap.undo.restore()


class StepUpdates:
    """The updates of one runner's steps, and the workers whose copies are current."""

    def __init__(self, context: StepContext, functions: SyncFunctions) -> None:
        self._context, self._functions = context, functions
        # By worker: the state of what its copies are of.
        self._copies: dict[int, Any] = {}

    def function(self, calls: Sequence[tuple[SyncFunction, Any]], batch: Any) -> SyncFunction:
        """The `SyncFunction` of a step's update, which has an `overlap` if steps may.

        Args:
            calls: List of pairs of the `SyncFunction` of a share and its argument.
            batch: Batch of one of them.
        """
        function = calls[0][0]
        # TensorFlow cannot give new functions to all tasks if one is lost, and says so at length.
        if not self._context.overlap.is_on or self._context.scheduler.queue.lost:
            return function
        if any(one is not function for one, _ in calls):
            return function
        if writes.are_traced:
            warn_once(
                "a function of the script assigns to variables on parameter servers, which may "
                "happen between any two steps; steps do not overlap. Received: overlap_steps=True"
            )
            return function
        return self._functions.overlapping(function, batch) or function

    @property
    def _state(self) -> tuple[int, int]:
        """State that changes with every write that workers' copies do not include."""
        return writes.count, self._context.extended.worker_states.losses

    def has_copies(self, worker: int) -> bool:
        """Whether a worker has copies of the weights as they are."""
        return self._copies.get(worker) == self._state

    def begin(self, function: SyncFunction, stamp: int, count: int, scale: float) -> StepUpdate:
        """An attempt's update, which has started if all workers have copies."""
        readers: list[int] = []
        if function.overlap is not None:
            lost = self._context.scheduler.queue.lost
            readers = [w for w in range(self._context.num_workers) if w not in lost]
        update = StepUpdate(function, stamp, readers, self._context.totals)
        if function.overlap is not None and all(map(self.has_copies, readers)):
            update.is_early = True
            update.start(count, scale)
        return update

    def abort(self, update: StepUpdate) -> None:
        """Undoes an update that has started; gradients may be missing."""
        if update.is_early:
            self._forget()
            update.abort()

    def finish(self, update: StepUpdate, count: int, scale: float) -> None:
        """Makes an update, or waits until it is made, and workers have read it."""
        # Another model of the same weights has copies of its own.
        writes.count += 1
        state = self._state
        if not update.is_early:
            update.start(count, scale)
        fresh = update.finish(lambda: self._context.scheduler.queue.lost)
        if len(fresh) < len(update.readers):
            self._forget()
        self._copies = dict.fromkeys(fresh, state)

    def _forget(self) -> None:
        """Has workers read the servers next, and share nothing with functions under way."""
        writes.count += 1
        self._functions.begin_generation()
