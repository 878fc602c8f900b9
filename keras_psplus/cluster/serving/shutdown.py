"""Shutdown messages of a chief to the tasks that serve it.

From outside, a chief that is done looks like one that was killed: its address stops answering. So
the chief greets its servers when it starts and sends a shutdown message at its end, by their
control channels. A server that was greeted and received no shutdown message knows that its chief
has died.
"""

import atexit
import concurrent.futures
import contextlib
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping

from keras_psplus.cluster.channel.sessions import RefusedError
from keras_psplus.cluster.serving import control

_HELLO, _SHUTDOWN = "hello", "shutdown"
_SHUTDOWN_SECONDS = 3.0


class ShutdownListener:
    """Receives, in a serving task, what its chief sends."""

    def __init__(self) -> None:
        self._received: set[str] = set()

    def receive(self, word: str) -> None:
        """Notes a word of the chief."""
        self._received.add(word)

    @property
    def has_chief_started(self) -> bool:
        """Whether a chief has sent anything."""
        return bool(self._received)

    @property
    def has_chief_left(self) -> bool:
        """Whether a chief has taken leave: it is about to end."""
        return _SHUTDOWN in self._received

    @property
    def is_chief_lost(self) -> bool:
        """Whether a chief that has ended since has greeted, but did not take leave."""
        return _HELLO in self._received and _SHUTDOWN not in self._received


class ShutdownNotifier:
    """Greets the servers, and takes leave of them when this process ends well.

    A script that ends by an exception does not end well.

    Args:
        addresses: The servers' addresses, by their task names.
        but: Names of those that are not there yet.
    """

    def __init__(self, addresses: Mapping[str, str], but: Collection[str] = ()) -> None:
        self._addresses = dict(addresses)
        self._has_ended = threading.Event()
        self._has_failed = False
        self._here: set[str] = set()
        with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(self.greet, [name for name in addresses if name not in but]))
        # At the interpreter's end no thread can be started any more.
        self._shutdown_thread = threading.Thread(target=self._send_shutdown, daemon=True)
        self._shutdown_thread.start()
        atexit.register(self._at_exit)

    def greet(self, task: str) -> None:
        """Greets a server that is there, or was started again."""
        self._send(_HELLO, [task])

    def is_told_to_end(self, task: str) -> bool:
        """Whether a task can be reached and has got SIGTERM."""
        with contextlib.suppress(OSError, RefusedError):
            address = self._addresses[task]
            return bool(control.ask(address, "is_told_to_end", {}, _SHUTDOWN_SECONDS))
        return False

    def told_to_end(self, job: str) -> Iterator[str]:
        """Names of the tasks of a job that can be reached and have got SIGTERM."""
        # Another thread may greet one that was started again.
        here = [name for name in list(self._here) if name.startswith(f"{job}-")]
        yield from filter(self.is_told_to_end, here)

    def are_told_to_end(self, job: str) -> bool:
        """Whether a task of a job that can be reached has got SIGTERM."""
        return any(True for _ in self.told_to_end(job))

    def let_go(self, task: str) -> None:
        """Has a task end that is told to, and does without it."""
        with contextlib.suppress(OSError, RefusedError):
            control.ask(self._addresses[task], "let_go", {}, _SHUTDOWN_SECONDS)
        self._here.discard(task)

    def note_failure(self) -> None:
        """Notes that this process is about to end, but not well."""
        self._has_failed = True

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None and not self._has_failed:
            self._has_ended.set()
            # A server that hangs must not hold up the chief.
            self._shutdown_thread.join(_SHUTDOWN_SECONDS)

    def _send_shutdown(self) -> None:
        self._has_ended.wait()
        self._send(_SHUTDOWN, list(self._here))

    def _send(self, word: str, tasks: Iterable[str]) -> None:
        for task in tasks:
            try:
                control.ask(self._addresses[task], "word", {"word": word}, _SHUTDOWN_SECONDS)
                self._here.add(task)
            except (OSError, RefusedError):
                self._here.discard(task)  # It has died, or is TensorFlow's own, without `serve`.
