"""SIGTERM to a process that trains, or serves one that does."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from typing import Any, NoReturn

from keras_psplus.log import logger

EXIT_CODE = 128 + signal.SIGTERM
# Seconds that a task has to save the job after SIGTERM; 0 for none. Not set: as long as it takes.
GRACE_VARIABLE = "KERAS_PSPLUS_GRACE"
# For the end of a step after which nothing is saved.
_SECONDS_WITHOUT_BACKUP = 5.0
_LONGEST_WAIT = 1e6


def grace_seconds() -> float:
    """Seconds of grace by the environment; infinity if it sets none.

    Raises:
        ValueError: If it is not a number of seconds.
    """
    text = os.environ.get(GRACE_VARIABLE) or "inf"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(
            f"{GRACE_VARIABLE} must be a number of seconds, at least 0: set it so, or unset it. "
            f"Received: {GRACE_VARIABLE}={text}"
        )
    return seconds


class _Signal:
    """SIGTERM, as this process is told of it while it trains or serves.

    A thread hears of it, too, by the pipe into which Python's own handler writes: it ends the
    process in time while a step hangs, in which the main thread hears nothing.

    Attributes:
        is_noted: Whether it has come.
        is_in_order: Whether this process is about to end for that, as the others know.
    """

    def __init__(self) -> None:
        self.is_noted = self.is_in_order = False
        self._is_watched = self._is_for_forks = self._is_handled = False
        self._grace = math.inf
        self._pipe: tuple[int, int] | None = None

    def watch(self, can_save: bool = True) -> None:
        """Notes SIGTERM from now on, unless the script or the launcher wants something else.

        Args:
            can_save: Whether there is something to save; else the grace is a few seconds at most.
        """
        if self._is_watched or threading.current_thread() is not threading.main_thread():
            return
        self._grace = min(grace_seconds(), math.inf if can_save else _SECONDS_WITHOUT_BACKUP)
        if not self._grace:
            return  # The launcher ends its tasks at once.
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
            return  # The script has its own.
        if not self._is_for_forks:
            os.register_at_fork(after_in_child=self._forget)
        self._is_for_forks = self._is_watched = True
        signal.signal(signal.SIGTERM, self._note)
        self._wake_thread()

    def _wake_thread(self) -> None:
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            threading.Thread(target=self._listen, args=self._pipe[:1], daemon=True).start()
        others = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if others not in (-1, self._pipe[1]):
            # As that of an event loop, which the script has; the thread hears nothing then.
            signal.set_wakeup_fd(others)

    def ignore(self) -> None:
        """Has SIGTERM end this process, as it does without this library."""
        if self._is_watched:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if (others := signal.set_wakeup_fd(-1)) not in (-1, *(self._pipe or ())):
                signal.set_wakeup_fd(others)
        self._is_watched = False

    def _forget(self) -> None:
        """In a forked process, which is told by itself, without the thread."""
        self.ignore()
        self._pipe = None

    def _note(self, number: int, frame: Any) -> None:
        again, self.is_noted, self._is_handled = self._is_handled, True, True
        if again:
            self._end("it was told twice")

    def _listen(self, pipe: int) -> None:
        poll, end, is_told = select.poll(), math.inf, False
        poll.register(pipe, select.POLLIN)
        while True:
            left = min(end - time.monotonic(), _LONGEST_WAIT)
            if not poll.poll(1000 * max(0.0, left)):
                if time.monotonic() >= end:
                    self._end(f"its {self._grace:g} s of grace are over")
            # Other signals that the script handles are written, too.
            elif signal.SIGTERM in os.read(pipe, 4096):
                if is_told:
                    self._end("it was told twice")
                self.is_noted = is_told = True
                end = time.monotonic() + self._grace

    def _end(self, why: str) -> NoReturn:
        if not self.is_in_order:
            logger.warning(
                "this process ends at once after SIGTERM, as %s; what it has not saved is lost. "
                "Received: exit code %d",
                why,
                EXIT_CODE,
            )
        os._exit(EXIT_CODE)


SIGNAL = _Signal()
