"""Answers hellos on a task's own address, also while others connect and send anything."""

import contextlib
import dataclasses
import selectors
import socket
import struct
import threading
import time

from keras_psplus.cluster.wire import hello
from keras_psplus.cluster.wire.hello import JobSecret
from keras_psplus.cluster.wire.identity import PeerIdentity, conflict

_POLL = 0.05
# Beyond that, the oldest that has not said hello makes room for the next one.
_MOST_CALLERS = 128
# A server that watches this task holds its connection for 30 s and says nothing.
_SILENCE = 40.0
# Seconds for which a call that has just begun, or was just answered, may hold up `close`.
_YOUNG, _CLOSING = 0.25, 0.5
# Hosts of strangers that are named, and seconds between two of them that wake who waits.
_MOST_STRANGERS, _WAKING = 8, 0.3
# An end by which no TIME_WAIT stays on the port, which TensorFlow binds next.
_ABORT = struct.pack("ii", 1, 0)


class Listener:
    """Answers hellos on a bound socket until closed.

    One thread looks after all connections, so that one that says nothing holds nobody up. Callers
    that do not prove that they know the job's secret are not listened to: whatever they send ends
    their own connection and no more.

    Args:
        bound: The bound, listening socket.
        mine: This process's `PeerIdentity`.
        job: The job's `JobSecret`.

    Attributes:
        identity: The same; what is answered from now on.
    """

    def __init__(self, bound: socket.socket, mine: PeerIdentity, job: JobSecret) -> None:
        self.problem: str | None = None  # the first conflict that a caller brought
        self.callers: set[str] = set()  # names of the tasks that have called and got an answer
        self.callers_from: dict[str, str] = {}  # the hosts from which they have called
        self.heard_all_here = False  # one of them has found all tasks
        self.strangers: list[str] = []  # the first hosts that have called without the secret
        self.changed = threading.Event()
        self._socket, self.identity, self._job = bound, mine, job
        self._next_waking = 0.0
        self._selector = selectors.DefaultSelector()
        self._connections: list[_Caller] = []
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def note_of_strangers(self) -> str:
        """Names the hosts that have called without the secret, for the end of a sentence."""
        if not self.strangers:
            return ""
        hosts = ", ".join(self.strangers)
        return f" (not listened to, as they do not know this job's secret: {hosts})"

    def close(self) -> None:
        """Stops listening, within a second; the port is free when this returns."""
        self._closing = True
        self._thread.join()

    def _serve(self):
        try:
            self._socket.setblocking(False)
            self._selector.register(self._socket, selectors.EVENT_READ)
            while not self._closing:
                self._look()
            deadline = time.monotonic() + _CLOSING
            while time.monotonic() < deadline and any(c.may_talk() for c in self._connections):
                self._look()
        finally:
            for caller in list(self._connections):
                self._drop(caller)
            self._selector.close()
            self._socket.close()

    def _look(self):
        for key, _ in self._selector.select(_POLL):
            if key.data is None:
                self._accept()
            else:
                self._go_on(key.data)
        too_many = len(self._connections) - _MOST_CALLERS
        silent = [caller for caller in self._connections if not caller.is_heard]
        late = [caller for caller in self._connections if caller.age() > _SILENCE]
        for caller in {*silent[: max(0, too_many)], *late}:
            self._drop(caller)

    def _accept(self):
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return  # it has gone again, or there are too many files
        connection.setblocking(False)
        caller = _Caller(connection)
        self._connections.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _go_on(self, caller):
        try:
            if caller.unsent:
                caller.send()
            elif caller.is_heard:
                # The caller closes first, so that TIME_WAIT stays on its side.
                if not caller.connection.recv(4096):
                    self._drop(caller)
            elif caller.read():
                answer = self._answer(caller) if caller.nonces else self._challenge(caller)
                if answer is None:
                    self._drop(caller)
                    return
                caller.line, caller.unsent = b"", answer
                caller.send()
            events = selectors.EVENT_WRITE if caller.unsent else selectors.EVENT_READ
            if caller in self._connections:
                self._selector.modify(caller.connection, events, caller)
        except BlockingIOError:
            pass
        except Exception:
            # Nothing that a caller sends may end this thread, and with it the job.
            self._drop(caller)

    def _challenge(self, caller):
        theirs = hello.fields_of(caller.line, "nonce")
        if theirs is None:
            return None
        nonce = hello.new_nonce()
        caller.nonces = (*theirs, nonce)
        return hello.line_of(nonce=nonce)

    def _answer(self, caller):
        theirs = hello.introduced(caller.line, self._job, hello.CALLER, caller.nonces)
        if theirs is None:
            return None
        host = caller.connection.getpeername()[0]
        if theirs.is_proven:
            caller.is_heard = True
            mine = self.identity
            self.problem = self.problem or conflict(mine, theirs)
            self.callers.add(theirs.task)
            self.callers_from[theirs.task] = host
            self.heard_all_here = self.heard_all_here or theirs.all_here
            self.changed.set()
        else:
            self._note_stranger(host)
            if self._job.is_token:
                return None
            # A task that was started with another cluster learns that, and no address.
            caller.is_heard = True
            mine = dataclasses.replace(self.identity, cluster="")
        return hello.introduction(mine, self._job, hello.LISTENER, caller.nonces)

    def _note_stranger(self, host):
        if host not in self.strangers and len(self.strangers) < _MOST_STRANGERS:
            self.strangers.append(host)
        if not self._job.is_token and time.monotonic() >= self._next_waking:
            # It may be a task of this cluster with another TF_CONFIG. What is at the task's
            # address is asked, not the caller.
            self._next_waking = time.monotonic() + _WAKING
            self.changed.set()

    def _drop(self, caller):
        self._connections.remove(caller)
        self._selector.unregister(caller.connection)
        with contextlib.suppress(OSError):  # Some systems refuse if the other end has gone.
            caller.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        caller.connection.close()


class _Caller:
    """One accepted connection and its buffers."""

    def __init__(self, connection):
        self.connection, self._since = connection, time.monotonic()
        self.line = self.unsent = b""
        self.nonces: tuple[str, ...] = ()
        self.is_heard = False

    def age(self):
        return time.monotonic() - self._since

    def may_talk(self):
        """Whether it has said hello, or may be about to."""
        return self.is_heard or self.age() < _YOUNG

    def read(self):
        """Reads what has come; returns whether that is all."""
        chunk = self.connection.recv(4096)
        self.line += chunk
        return not chunk or hello.is_whole(self.line)

    def send(self):
        self.unsent = self.unsent[self.connection.send(self.unsent) :]
