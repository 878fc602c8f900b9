"""SIGTERM to a process that trains or serves, and the error that ends it."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from keras_psplus.engine import Call
from keras_psplus.log import logger

# SIGTERM to a process that trains, or serves one that does.

EXIT_CODE = 128 + signal.SIGTERM
# Seconds that a task has to save the job after SIGTERM; 0 for none. Not set: as long as it takes.
GRACE_VARIABLE = "KERAS_PSPLUS_GRACE"
# For a worker that is told to leave, of which its chief takes no notice.
_ALONE_SECONDS = 30.0
_LONGEST_WAIT = 1e6
# For a line to be written, where what reads it, or who holds its lock, may hang.
_LINE_SECONDS = 1.0


def grace_seconds() -> float:
    """Seconds of grace by the environment; infinity if it sets none."""
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


def restore_handler() -> None:
    """Gives SIGTERM back to the script, or to its default.

    TensorFlow's collective server handles it below Python, where it is only noted: a process that
    makes its model or reads its data would not end.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


class _Signal:
    """SIGTERM, as this process is told of it while it trains or serves.

    A thread hears of it, too, by the pipe into which Python's own handler writes: it ends the
    process in time while a step hangs, in which the main thread hears nothing.

    Attributes:
        is_noted: Whether it has come.
        is_in_order: Whether this process is about to end for that, as the others know.
        at_once: Line with which it ends at once, as there is nothing to save; or None.
    """

    def __init__(self) -> None:
        self.is_noted = self.is_in_order = False
        self.at_once: str | None = None
        self._is_watched = self._is_for_forks = self._is_handled = False
        self._mode: Literal["save", "leave"] = "save"
        self._grace, self._end_at = math.inf, math.inf
        self._pipe: tuple[int, int] | None = None
        # The handler and the thread may both hear of what ends this process.
        self._is_said = threading.Lock()
        # Signals that a thread which forks had blocked before.
        self._blocked = threading.local()

    def watch(self, at_once: str | None = None, mode: Literal["save", "leave"] = "save") -> None:
        """Notes SIGTERM from now on, unless the script or the launcher wants something else.

        Args:
            at_once: The line, if there is nothing to save in what is begun; what is under way
                around it may have something.
            mode: `"save"` if the job is saved before it ends, `"leave"` if it goes on without this
                process, which then ends as soon as it may, without a line.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if self._is_watched:
            self.at_once = None if at_once is None else self.at_once
            return
        self._grace = grace_seconds() if mode == "save" else _ALONE_SECONDS
        self._mode, self.at_once = mode, at_once
        if not self._grace:
            return  # The launcher ends its tasks at once.
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
            return  # The script has its own.
        if not self._is_for_forks:
            os.register_at_fork(
                before=self._block, after_in_parent=self._unblock, after_in_child=self._forget
            )
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
        if not self._is_watched or threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (others := signal.set_wakeup_fd(-1)) not in (-1, *(self._pipe or ())):
            signal.set_wakeup_fd(others)
        self._is_watched, self._end_at = False, math.inf

    def _block(self) -> None:
        # A child has the handler and the pipe at first, and would be told in this process's place.
        self._blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked.before)

    def _forget(self) -> None:
        """In a forked process, which is told by itself, without the thread."""
        self.ignore()
        self._pipe = None
        self._unblock()

    def _note(self, number: int, frame: Any) -> None:
        again, self.is_noted, self._is_handled = self._is_handled, True, True
        if again or self.at_once:
            self._end("it was told twice")

    def _listen(self, pipe: int) -> None:
        poll, is_told = select.poll(), False
        poll.register(pipe, select.POLLIN)
        while True:
            left = min(self._end_at - time.monotonic(), _LONGEST_WAIT)
            if not poll.poll(1000 * max(0.0, left)):
                if time.monotonic() >= self._end_at:
                    self._end(f"its {self._grace:g} s of grace are over")
            # Other signals that the script handles are written, too.
            elif signal.SIGTERM in os.read(pipe, 4096):
                if is_told or self.at_once:
                    self._end("it was told twice")
                self.is_noted = is_told = True
                self._end_at = time.monotonic() + self._grace

    def end_after(self, seconds: float) -> None:
        """Ends this process, as nobody needs it any more."""
        timer = threading.Timer(seconds, self._end, ["it was let go"])
        timer.daemon = True
        timer.start()

    def _say(self, why: str) -> None:
        if self._mode == "leave":
            sys.stdout.flush()
            sys.stderr.flush()
            return
        line = self.at_once or (
            f"this process ends at once after SIGTERM, as {why}; what it has not saved is lost. "
            f"Received: exit code {EXIT_CODE}"
        )
        logger.warning("%s", line)

    def _end(self, why: str) -> NoReturn:
        if not self.is_in_order and self._is_said.acquire(blocking=False):
            saying = threading.Thread(target=self._say, args=(why,), daemon=True)
            saying.start()
            saying.join(_LINE_SECONDS)
        elif not self.is_in_order:
            time.sleep(_LINE_SECONDS)  # The other one ends it, once the line is written.
        os._exit(EXIT_CODE)


SIGNAL = _Signal()


# Exit code of this process, which Python does not pass to `atexit` functions.


class _Exits:
    """Arguments of `sys.exit` since recording began."""

    def __init__(self) -> None:
        self.is_watching = False
        self.codes: list[Any] = []

    def note(self, call: Call) -> None:
        """`sys.exit`, which is replaced like functions of Keras; see `keras_hooks.variables`."""
        self.codes.append(call.owner)
        call.proceed()


EXITS = _Exits()


class _Uncaught:
    """Exceptions that end the process, which `sys.excepthook` is called with.

    Attributes:
        reporters: List of functions of an exception's class and the exception, called before it is
            shown. Each returns a function to be called afterwards, or None.
    """

    def __init__(self) -> None:
        self.reporters: list[Callable[[type[BaseException], BaseException], Any]] = []

    def show(self, call: Call) -> None:
        """`sys.excepthook`, which is replaced as `sys.exit` is."""
        error: BaseException = call.args[0]
        waits = [report(call.owner, error) for report in self.reporters]
        call.proceed()
        for wait in filter(None, waits):
            wait()


UNCAUGHT = _Uncaught()


def watch() -> None:
    """Notes from now on what `sys.exit` is called with."""
    EXITS.is_watching = True


def last() -> Any:
    """The last argument of `sys.exit`, or 1 if it was not called.

    1 is Python's exit code after an exception.
    """
    return EXITS.codes[-1] if EXITS.codes else 1


def is_bad() -> bool:
    """Whether the script ends by an exception, or with an exit code of failure."""
    has_failed = bool(EXITS.codes) and EXITS.codes[-1] not in (None, 0)
    return has_failed or getattr(sys, "last_value", None) is not None
