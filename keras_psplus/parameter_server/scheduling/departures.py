"""Lets workers go that have got SIGTERM, after the steps that they have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from keras_psplus.cluster.process.termination import SIGNAL
from keras_psplus.log import logger
from keras_psplus.parameter_server.scheduling.membership import Members
from keras_psplus.parameter_server.scheduling.queue import ClosureQueue

_ASK_SECONDS = 1.0


class Departures:
    """Asks workers whether they are told to end, and lets them go.

    Args:
        queue: `ClosureQueue`.
        members: `Members`, which has TensorFlow forget those that leave.
        told_to_end: Function that returns the names of the workers that are told to end.
        let_go: Function that has the worker of a name end.
    """

    def __init__(
        self,
        queue: ClosureQueue,
        members: Members,
        told_to_end: Callable[[], Iterable[str]],
        let_go: Callable[[str], None],
    ) -> None:
        self._queue, self._members = queue, members
        self._told_to_end, self._let_go = told_to_end, let_go
        threading.Thread(target=self._run, name="Departures", daemon=True).start()

    def _run(self) -> None:
        before: set[str] = set()
        while not self._queue.is_closed:
            told = set(self._told_to_end())
            # A scheduler that ends the whole job sends it to the chief as well, which saves first.
            for name in [] if SIGNAL.is_noted else sorted(told & before):
                worker = int(name.rpartition("-")[2])
                if worker not in self._queue.leaving:
                    logger.info("%s is told to end (SIGTERM): others take its next steps", name)
                    self._queue.retire(worker)
                if worker in self._members.absent:
                    self._let_go(name)
            before = told
            time.sleep(_ASK_SECONDS)
