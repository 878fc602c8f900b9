"""Bounded staleness: asynchronous steps of which no worker gets too far ahead of the slowest.

The chief gives each step to a worker that may begin with it. Workers do not wait for one another
beyond that: a step reads whatever updates have been made.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from keras_psplus.parameter_server.scheduling.closures import Closure
from keras_psplus.parameter_server.steps.runner import StepRunner

if TYPE_CHECKING:
    from keras_psplus.parameter_server.data.worker_data import Ticket

_STEPS_PER_WORKER = 2


class Clocks:
    """Clocks of the workers: steps given and steps done.

    Args:
        num_workers: Number of workers.
        bound: Maximum number of steps given to a worker beyond those that the slowest worker has
            done, when it is given another.
    """

    def __init__(self, num_workers: int, bound: int) -> None:
        self._bound = bound
        self._lock = threading.Lock()
        self._given = [0] * num_workers
        self._done = [0] * num_workers
        self._live = set(range(num_workers))

    def watch(self, workers: Iterable[Any]) -> None:
        """Learns of losses and recoveries from TensorFlow's `Worker`s.

        A worker that is lost holds up nobody, and one that comes back is where the slowest is.
        """
        for worker in workers:
            for name, note in (
                ("_on_closure_failure", self.lose),
                ("_on_worker_recovery", self.welcome),
            ):
                noted = functools.partial(_noted, note, worker.worker_index, getattr(worker, name))
                setattr(worker, name, noted)

    def lose(self, worker: int) -> None:
        """Notes that a worker is lost."""
        with self._lock:
            self._live.discard(worker)

    def welcome(self, worker: int) -> None:
        """Notes that a worker is back."""
        with self._lock:
            behind = self._slowest() - self._done[worker] if self._live else 0
            self._live.add(worker)
            if behind > 0:
                self._done[worker] += behind
                self._given[worker] += behind

    def _slowest(self):
        return min(self._done[worker] for worker in self._live)

    def _next(self):
        waiting = {w: self._given[w] - self._done[w] for w in self._live}
        free = [
            worker
            for worker, count in waiting.items()
            if count < _STEPS_PER_WORKER and self._given[worker] - self._slowest() <= self._bound
        ]
        return min(free, key=lambda w: (waiting[w], self._given[w]), default=None)

    @property
    def is_free(self) -> bool:
        """Whether a worker may be given a step."""
        with self._lock:
            return self._next() is not None

    def give(self) -> int:
        """Gives a step to the worker that has least to do; returns its number."""
        with self._lock:
            worker = self._next()
            self._given[worker] += 1
            return worker

    def settle(self) -> None:
        """Forgets unfinished steps after an error has ended training."""
        with self._lock:
            self._given = list(self._done)

    def move(self, giver: int, taker: int) -> None:
        """Notes that a worker takes a lost one's step."""
        with self._lock:
            self._given[giver] -= 1
            self._given[taker] += 1

    def finish(self, worker: int) -> None:
        """Notes that a worker has done a step."""
        with self._lock:
            self._done[worker] += 1


class BoundedRunner(StepRunner):
    """Sends train steps to the workers that may begin with one, each by itself."""

    def submit(self, batches: Any, element_spec: Any = None, ticket: Ticket | None = None) -> None:
        for batch in batches:
            super().submit([batch], element_spec)

    def _send(self, function, args, on_done, about, ticket, may_overlap):
        scheduler, clocks = self._strategy._scheduler, self._strategy._clocks
        if not scheduler.is_busy:
            clocks.settle()
        scheduler.wait_for(lambda: clocks.is_free)
        closure = _BoundedClosure(function, scheduler.cancellation_manager, args)
        closure.clocks, closure.home = clocks, clocks.give()

        def done(result, worker):
            clocks.finish(closure.home)
            on_done(result, worker)

        scheduler.start(closure, done, about, closure.home)


class _BoundedClosure(Closure):
    clocks, home = None, None

    def run_on(self, worker):
        if worker.worker_index != self.home:
            self.clocks.move(self.home, worker.worker_index)
            self.home = worker.worker_index
        super().run_on(worker)


def _noted(note, worker, method, *args):
    note(worker)
    return method(*args)
