"""Re-admits a restarted worker to the cluster between steps.

TensorFlow does so beside the steps of the other workers, and waits within the call until the lost
worker is there. It gives each task's runtime a new table of the functions that others run for it,
and a step that is under way then may look for its functions in the wrong table.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_psplus.log import logger
from keras_psplus.tf_internals import cluster_coordinator, context

_RETRY_SECONDS = 0.5


class PausingRecovery:
    """Stands in for the thread of TensorFlow's coordinator that mends the cluster.

    Args:
        handler: TensorFlow's `WorkerPreemptionHandler`.
        are_back: Function that returns whether all workers respond.
    """

    def __init__(self, handler: Any, are_back: Callable[[], bool]) -> None:
        self._handler, self._are_back = handler, are_back
        self._changed = threading.Condition()
        self._running, self._is_paused = 0, False
        self._end_thread_of_tensorflow()
        threading.Thread(target=self._run, name="PausingRecovery", daemon=True).start()

    def _end_thread_of_tensorflow(self):
        handler = self._handler
        handler._should_preemption_thread_run = False
        handler._cluster_due_for_update_or_finish.set()
        handler._preemption_handler_thread.join()
        handler._cluster_due_for_update_or_finish.clear()
        handler._should_preemption_thread_run = True

    @property
    def is_due(self) -> bool:
        """Whether it waits for steps to end."""
        return self._is_paused

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which a closure runs; begins when the cluster is not being mended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _pause(self):
        with self._changed:
            self._is_paused = True
            self._changed.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def _run(self):
        handler = self._handler
        is_due = handler._cluster_due_for_update_or_finish
        while True:
            is_due.wait()
            if not handler._should_preemption_thread_run:
                return
            # The others go on meanwhile, which TensorFlow's own call would not let them do here.
            if not self._are_back():
                time.sleep(_RETRY_SECONDS)
                continue
            with self._pause(), handler._cluster_update_lock:
                self._mend()

    def _mend(self):
        handler = self._handler
        try:
            context.context().update_server_def(handler._server_def)
        except Exception as error:
            if cluster_coordinator._is_worker_failure(error):
                logger.warning("a worker was lost again while it was taken back: %s", error)
                return
            # As TensorFlow's own does: it is raised by the lane that waits.
            handler._error_from_recovery = error
        handler._worker_up_cond.notify_all()
        if handler._should_preemption_thread_run:
            handler._cluster_due_for_update_or_finish.clear()
