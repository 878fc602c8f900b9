"""Departure of a worker that has got SIGTERM, while its job goes on.

Its chief asks its workers every second. It gives one that is told so no more steps, and lets it go
once it has done those that it has. A worker that is not asked ends by itself after a while.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from keras_psplus.cluster.process import termination

_ALONE_SECONDS, _ANSWER_SECONDS = 30.0, 0.2


class Departure:
    """End of this process by SIGTERM, as soon as its chief does without it.

    Args:
        log: Function that takes a line.

    Attributes:
        is_due: Whether SIGTERM has come.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self.is_due = log, False

    def watch(self) -> None:
        """Notes SIGTERM from now on, unless the script wants something else."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if self.is_due:
            self._end()  # It was told twice.
        self.is_due = True
        self._end_after(_ALONE_SECONDS)

    def let_go(self) -> None:
        """Ends this process, once its chief has its answer."""
        self._log("the chief does without this worker, which ends: it was told to (SIGTERM)")
        self._end_after(_ANSWER_SECONDS)

    def _end_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(termination.EXIT_CODE)
