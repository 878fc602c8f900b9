"""Clocks of workers: steps given and done, and who may begin with another."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from keras_psplus.engine import Call

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
        """Learns of losses and recoveries from TensorFlow's `Worker`s; see `keras_hooks.runtime`.

        A worker that is lost holds up nobody, and one that comes back is where the slowest is.
        """
        for worker in workers:
            worker._clocks = self

    def lost(self, call: Call) -> Any:
        """Does what TensorFlow does about a closure that has failed as its worker is lost."""
        self.lose(call.owner.worker_index)
        return call.proceed()

    def recovered(self, call: Call) -> Any:
        """Does what TensorFlow does when a worker is back."""
        self.welcome(call.owner.worker_index)
        return call.proceed()

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
