"""Clocks of workers: steps given and done, and choice of the next worker.

    steps of an epoch ─► [ fewest steps first ] ─┬─► worker 0: running, waiting, waiting  (is full)
                                                 └─► worker 1: running, waiting

1. Equally fast workers get equally many: the one with the fewest steps is next, and may have some
   more in its queue than the others, so that noise in the times of steps decides nothing.
2. A slower worker's queue fills up; the others get the steps then, in proportion to their speed.
3. At the end of an epoch, an idle worker takes steps that wait in a slower one's queue.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.parameter_server.tracing import remote
from keras_psplus.tf_internals import context, coordinator_context, executor

# Steps by which equally fast workers may be apart for a while.
_NOISE = 4


class Clocks:
    """Clocks of the workers: steps given and done, under the queue's lock."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._bound = num_workers, math.inf
        self._given = [0] * num_workers
        self._done = [0] * num_workers
        self._live = set(range(num_workers))
        # The next worker if all have as many, so that it is not always the same one.
        self._first = 0

    def begin(self, bound: float = math.inf) -> None:
        """Starts to count from zero, while no step is under way.

        At most `bound` steps are given to a worker beyond those that the slowest has done.
        """
        self._bound = bound
        self._given, self._done = [0] * self._num_workers, [0] * self._num_workers
        self._first += 1

    def settle(self) -> None:
        """Forgets unfinished steps, while none is under way: an error has ended them."""
        self._given = list(self._done)

    def lose(self, worker: int) -> None:
        """Notes that a worker is lost, so that it holds up nobody."""
        self._live.discard(worker)

    def welcome(self, worker: int) -> None:
        """Notes that a worker is back, as far as the slowest one."""
        behind = self._slowest() - self._done[worker] if self._live else 0
        self._live.add(worker)
        if behind > 0:
            self._done[worker] += behind
            self._given[worker] += behind

    def _slowest(self) -> int:
        return min(self._done[worker] for worker in self._live)

    def _waiting(self, worker: int) -> int:
        return self._given[worker] - self._done[worker]

    def free(self, window: int) -> list[int]:
        """Workers that may be given a step, in order; `window` steps keep one busy."""
        able = [w for w in self._live if self._given[w] - self._slowest() <= self._bound]
        if all(self._waiting(worker) >= window for worker in able):
            return []
        return sorted(
            (worker for worker in able if self._waiting(worker) < window + _NOISE),
            key=lambda w: (
                *(self._given[w], self._waiting(w)),
                (w - self._first) % self._num_workers,
            ),
        )

    def give(self, worker: int) -> None:
        self._given[worker] += 1

    def slower(self, idle: int) -> int | None:
        """Worker whose waiting step an idle worker may take, or None."""
        given, done = self._given, self._done
        if self._waiting(idle) or idle not in self._live:
            return None
        if given[idle] - self._slowest() > self._bound:
            return None
        # Noise adds up as the square root of the number of steps.
        ahead = done[idle] - 2 - math.sqrt(done[idle]) / 2
        slower = [
            w
            for w in self._live
            if self._waiting(w) > 1 and (given[w] > given[idle] or done[w] < ahead)
        ]
        return max(slower, key=self._waiting, default=None)

    def move(self, giver: int, taker: int) -> None:
        self._given[giver] -= 1
        self._given[taker] += 1

    def finish(self, worker: int) -> None:
        self._done[worker] += 1


# A worker as the chief sees it: its resources, and calls of functions on it.


class RemoteWorker:
    """A worker, with the resources that functions find on it."""

    def __init__(self, index: int) -> None:
        # The name is TensorFlow's, for `experimental_get_current_worker_index`.
        self.index = self.worker_index = index
        self.name = f"worker-{index}"
        self.device_name = f"/job:worker/replica:0/task:{index}"
        self._lock = threading.Lock()
        self.forget()

    def resource(self, owner: Any, make: Callable[[], Any]) -> Any:
        """A resource of this worker, made if missing, and deleted with its owner."""
        with self._lock:
            if owner not in self._resources:
                self._resources[owner] = make()
            return self._resources[owner]

    def forget(self) -> None:
        """Notes that the worker has lost its resources."""
        self._resources: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class WorkerCalls:
    """Calls of functions on a worker, one after another, with what may cancel them."""

    def __init__(self, worker: RemoteWorker) -> None:
        self.worker = worker
        self.cancellation: Any = None
        self._executor = executor.new_executor(enable_async=False)

    def clear_error(self) -> None:
        """Forgets the error of a call, which TensorFlow would raise once more."""
        self._executor.clear_error()

    def call(self, concrete: tf.types.experimental.ConcreteFunction, *args: Any) -> Any:
        """Calls a function on the worker; returns its outputs, which stay there."""
        with (
            tf.device(self.worker.device_name),
            context.executor_scope(self._executor),
            coordinator_context.with_dispatch_context(self.worker),
        ):
            flat = iter(remote.call(concrete, *args, cancellation=self.cancellation))
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(flat),
            concrete.structured_outputs,
            expand_composites=True,
        )
