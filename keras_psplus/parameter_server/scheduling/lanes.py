"""Several closures of one worker at a time, each in a separate lane.

TensorFlow's coordinator has a thread for each worker, which sends a closure and waits for it before
it takes the next one. So a worker's link carries reads, then nothing, then gradients. With lanes
the next closure is sent while the one before is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from keras_psplus.engine import Call
from keras_psplus.parameter_server.scheduling.recovery import PausingRecovery
from keras_psplus.tf_internals import cluster_coordinator, executor


class Lanes:
    """Runs the closures that a worker's thread takes from the queue.

    Closures whose `may_overlap` is true run beside each other, others alone. When the worker is
    lost, one lane waits for it to come back, as TensorFlow's thread would, and the others only give
    their closures back.

    Args:
        worker: TensorFlow's `Worker`.
        count: How many closures may be under way.
        recovery: `PausingRecovery`, that of all workers.
    """

    def __init__(self, worker: Any, count: int, recovery: PausingRecovery) -> None:
        self._changed = threading.Condition()
        self._count = count
        self._free = [_Lane(worker, self, recovery) for _ in range(count)]
        self._is_lost, self._losses = False, 0
        worker._lanes = self

    @property
    def losses(self) -> int:
        """Number of times that the worker was lost and returned."""
        return self._losses

    def process(self, call: Call) -> None:
        """Runs a closure that TensorFlow's thread has dequeued, on a free lane."""
        closure = call.get("closure")
        is_alone = not getattr(closure, "may_overlap", False)
        if is_alone:
            self._wait_until(lambda: len(self._free) == self._count or self._is_lost)
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            lane = self._free.pop()
        if is_alone:
            self._run(lane, closure)
        else:
            threading.Thread(
                target=self._run, args=(lane, closure), name="WorkerLane", daemon=True
            ).start()
        del closure
        # Now: a closure that has been taken from the queue is not there for other workers.
        self._wait_until(lambda: self._free and not self._is_lost)

    def _run(self, lane, closure):
        try:
            lane.process(closure)
        finally:
            del closure
            with self._changed:
                self._free.append(lane)
                self._changed.notify_all()

    def claim_loss(self, losses: int) -> bool:
        """Whether a lane is the first to detect the worker's loss, and must handle it.

        Args:
            losses: Value of `losses` when the lane started.
        """
        with self._changed:
            if self._is_lost or losses != self._losses:
                return False
            self._is_lost = True
            return True

    def end_loss(self) -> None:
        """Notes that the worker is back, or given up."""
        with self._changed:
            self._is_lost = False
            self._losses += 1
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], Any]) -> None:
        with self._changed:
            self._changed.wait_for(condition)


class _Lane:
    """Stand-in for the worker in one lane's closures, with a separate executor."""

    def __init__(self, worker, lanes, recovery):
        self._worker, self._lanes, self._recovery = worker, lanes, recovery
        self.worker_index, self.device_name = worker.worker_index, worker.device_name
        self.executor = executor.new_executor(enable_async=False)

    @property
    def _queue(self):
        return self._worker._cluster.closure_queue

    def process(self, closure):
        """Runs a closure, and gives it back if the worker is lost."""
        losses = self._lanes.losses
        try:
            with self._recovery.running():
                closure.execute_on(self)
                closure.maybe_call_with_output_remote_value(lambda result: result.get())
        except Exception as error:
            if not cluster_coordinator._is_worker_failure(error):
                self._handle(closure, error)
            elif self._lanes.claim_loss(losses):
                try:
                    self._handle(closure, error)
                finally:
                    self._lanes.end_loss()
            else:
                self._queue.put_back(closure)
        else:
            self._queue.mark_finished()

    def _handle(self, closure, error):
        """Does what TensorFlow's thread would do about an error."""
        try:
            with self._worker.failure_handler.wait_on_failure(
                on_failure_fn=lambda e: self._worker._on_closure_failure(closure, e),
                on_transient_failure_fn=lambda: self._queue.put_back(closure),
                on_recovery_fn=self._worker._on_worker_recovery,
                worker_device_name=self.device_name,
            ):
                raise error
        except Exception as final:
            final_error = final
            closure.maybe_call_with_output_remote_value(
                lambda result: result._set_error(final_error)
            )
            self._queue.mark_failed(final)
