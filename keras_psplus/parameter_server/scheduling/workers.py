"""Threads that run closures on workers, and the coming of workers.

A worker has a thread for each closure that it may have under way, so that one may be read while
another computes and a third one is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import tensorflow as tf

from keras_psplus.log import logger
from keras_psplus.parameter_server.scheduling.closures import Closure
from keras_psplus.parameter_server.scheduling.membership import Members
from keras_psplus.parameter_server.scheduling.queue import ClosureQueue
from keras_psplus.parameter_server.scheduling.remote_worker import RemoteWorker, WorkerCalls
from keras_psplus.parameter_server.tracing.losses import is_worker_loss

_RETRY_SECONDS = 0.5


class Lane:
    """A thread that runs one closure after another on a worker.

    Args:
        worker: `RemoteWorker`.
        queue: `ClosureQueue` that it takes them from.
    """

    def __init__(self, worker: RemoteWorker, queue: ClosureQueue) -> None:
        self._worker, self._queue, self._calls = worker, queue, WorkerCalls(worker)
        threading.Thread(target=self._run, name=f"Lane-{worker.name}", daemon=True).start()

    def _run(self) -> None:
        while (closure := self._queue.take(self._worker.index)) is not None:
            self._process(closure)
            # Else it would be kept, with its result, until there is another one.
            del closure

    def _process(self, closure: Closure) -> None:
        queue, losses = self._queue, self._queue.losses[self._worker.index]
        self._calls.cancellation = queue.cancellation
        try:
            closure.execute_on(self._calls)
        except Exception as error:
            self._calls.clear_error()
            # Of calls that end because another one has failed, which says why.
            is_derived = isinstance(error, tf.errors.CancelledError) and "/job:" in str(error)
            if queue.error is not None or is_derived or queue.is_passing(error):
                queue.give_back(closure)
            elif is_worker_loss(error):
                self._worker.forget()
                queue.lose(closure, losses)
            else:
                queue.end(closure, error)
        else:
            queue.end(closure)


class Reconnection:
    """Takes workers in that were lost, or were not there before, between steps.

    TensorFlow gives each task's runtime a new table of the functions that others run for it, and a
    step that is under way then may look for its functions in the wrong table.

    Args:
        queue: `ClosureQueue`.
        members: `Members`.
        on_back: Called with the number of a worker that is back, before it gets a closure.
    """

    def __init__(
        self, queue: ClosureQueue, members: Members, on_back: Callable[[int], None]
    ) -> None:
        self._queue, self._members, self._on_back = queue, members, on_back
        threading.Thread(target=self._run, name="Reconnection", daemon=True).start()

    def _run(self) -> None:
        while lost := self._queue.wait_for_loss():
            # The others go on meanwhile: TensorFlow's own call waits for all of them.
            try:
                found = self._members.ready(lost, self._queue.leaving)
            except RuntimeError as ending:
                if "interpreter shutdown" not in str(ending):
                    raise
                return  # The script ends without the worker.
            if found is None:
                time.sleep(_RETRY_SECONDS)
                continue
            error = self._mend(lost - found)
            if error is not None and is_worker_loss(error):
                logger.warning("a worker was lost again while it was taken back: %s", error)
                continue
            if error is not None:
                self._queue.fail(error)
            for worker in sorted(found):
                if error is None:
                    self._on_back(worker)
                # Or else steps find out whether it is there.
                self._queue.welcome(worker)

    def _mend(self, absent: set[int]) -> Exception | None:
        with self._queue.paused():
            try:
                self._members.connect(absent)
            except Exception as error:
                return error
        return None
