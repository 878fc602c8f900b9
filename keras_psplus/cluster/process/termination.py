"""SIGTERM to a process that trains, or serves one that does."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM
# Seconds that the launcher leaves its tasks to save the job after SIGTERM; 0 for none.
GRACE_VARIABLE = "KERAS_PSPLUS_GRACE"


class _Signal:
    """SIGTERM, as this process is told of it while it trains or serves.

    Attributes:
        is_noted: Whether it has come.
        has_saved: Whether the job was saved for that, and this process is about to end.
    """

    def __init__(self) -> None:
        self.is_noted = self.has_saved = False
        self._is_watched = self._is_for_forks = False

    def watch(self) -> None:
        """Notes SIGTERM from now on, unless the script or the launcher wants something else."""
        if self._is_watched or threading.current_thread() is not threading.main_thread():
            return
        if float(os.environ.get(GRACE_VARIABLE) or 1) <= 0:
            return  # The launcher ends its tasks at once.
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
            return  # The script has its own.
        if not self._is_for_forks:
            os.register_at_fork(after_in_child=self.ignore)
        self._is_for_forks = self._is_watched = True
        signal.signal(signal.SIGTERM, self._note)

    def ignore(self) -> None:
        """Has SIGTERM end this process, as it does without this library."""
        if self._is_watched:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_watched = False

    def _note(self, number: int, frame: Any) -> None:
        if self.is_noted:
            os._exit(EXIT_CODE)  # It was told twice.
        self.is_noted = True


SIGNAL = _Signal()
