"""OverlapState steps: the workers whose copies are current, and updates under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus.log import warn_once
from keras_psplus.parameter_server.overlap.overlapped_update import PipelinedUpdate
from keras_psplus.parameter_server.tracing.chief_writes import writes

if TYPE_CHECKING:
    from keras_psplus.parameter_server.context import StepContext
    from keras_psplus.parameter_server.overlap.sync_overlap import OverlapFunctions
    from keras_psplus.parameter_server.sync.sync_functions import SyncFunction, SyncFunctions


class OverlapState:
    """The overlapping steps of one runner.

    Args:
        context: The strategy's `StepContext`.
        functions: `SyncFunctions`.
    """

    def __init__(self, context: StepContext, functions: SyncFunctions) -> None:
        self._context, self._functions = context, functions
        # By worker: the state of what its copies are of.
        self._copies: dict[int, Any] = {}

    def functions(
        self, calls: Sequence[tuple[SyncFunction, Any]], batch: Any
    ) -> OverlapFunctions | None:
        """Functions of a step that overlaps with the next one; None if it does not.

        Args:
            calls: List of pairs of the `SyncFunction` of a share and its argument.
            batch: Batch of one of them.
        """
        function = calls[0][0]
        if not self._context.overlap.is_on or any(one is not function for one, _ in calls):
            return None
        if self._context.scheduler.queue.lost:
            # TensorFlow cannot give new functions to all tasks, and says so at length.
            return None
        if writes.are_traced:
            warn_once(
                "a function of the script assigns to variables on parameter servers, which may "
                "happen between any two steps; steps do not overlap. Received: overlap_steps=True"
            )
            return None
        return function.overlapped(batch)

    @property
    def _workers(self) -> list[int]:
        lost = self._context.scheduler.queue.lost
        return [worker for worker in range(self._context.num_workers) if worker not in lost]

    @property
    def _state(self) -> tuple[int, int]:
        """State that changes with every write that workers' copies do not include."""
        return writes.count, self._context.extended.worker_states.losses

    def has_copies(self, worker: int) -> bool:
        """Whether a worker has copies of the weights as they are."""
        return self._copies.get(worker) == self._state

    def all_have_copies(self) -> bool:
        """Whether all workers have, of those that can be reached."""
        return all(self.has_copies(worker) for worker in self._workers)

    def start(
        self, overlapped: OverlapFunctions, stamp: int, count: int, scale: float
    ) -> PipelinedUpdate:
        """Begins with an update; see `PipelinedUpdate`."""
        totals = self._context.totals
        return PipelinedUpdate(overlapped, stamp, count, scale, self._workers, totals)

    def finish(self, update: PipelinedUpdate) -> None:
        """Waits until an update is made, and workers have read it."""
        # Another model of the same weights has copies of its own.
        writes.count += 1
        state = self._state
        scheduler = self._context.scheduler
        fresh = update.finish(lambda: scheduler.queue.lost)
        if len(fresh) < len(update.readers):
            self.forget()
        self._copies = dict.fromkeys(fresh, state)

    def forget_copies(self) -> None:
        """Has all workers read the servers in the next step."""
        writes.count += 1

    def forget(self) -> None:
        """The same, and nothing is shared with functions that may still be under way."""
        self.forget_copies()
        self._functions.begin_generation()
