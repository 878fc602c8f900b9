"""All parameter servers of a job, and a worker's requests, which count once.

A client numbers its requests, and repeats those whose answers were lost. Each request has the
number up to which the client has all answers: those the server forgets, except for that number,
which identifies a request that arrives late, or that somebody has overheard and replays.
"""

import atexit
import collections
import contextlib
import functools
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_psplus.all_reduce import liveness
from keras_psplus.all_reduce.liveness import StepMarks
from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel import (
    BUSY,
    AnotherProcessError,
    ChannelClient,
    ChannelError,
    RefusedError,
    Secret,
    Session,
    Tls,
)
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig, task_name
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.ports import control_address
from keras_psplus.cluster.process import signals
from keras_psplus.core.batch.batches import World
from keras_psplus.errors import TableServerError, TableServerLostError
from keras_psplus.hybrid.calls import RowKey, RpcClient
from keras_psplus.log import logger
from keras_psplus.process_identity import own_id

_LATE = {"error": "This request has had its answer. Received: a request that comes again"}


class TicketBook:
    def __init__(self) -> None:
        self._client, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._last, self._open, self._lock = 0, set[int](), threading.Lock()

    def open(self) -> int:
        with self._lock:
            self._last = next(self._numbers)
            self._open.add(self._last)
            return self._last

    def close(self, number: int) -> None:
        """Notes that a request's answer has come, or is not waited for any more."""
        with self._lock:
            self._open.discard(number)

    def ticket(self, number: int) -> tuple[str, int, int]:
        """Ticket of a request: client, number, and number up to which all are answered."""
        with self._lock:
            return self._client, number, min(self._open, default=self._last + 1) - 1


class Tickets:
    """Server's record of received requests, and of answers that clients may request again."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()

    def take(self, client: str, number: int, read: int) -> bool:
        """Notes a request; returns whether it has not come before.

        The client has all answers up to the number `read`.
        """
        with self._lock:
            known = self._clients.setdefault(client, _Client())
            known.forget(read)
            is_new = number > known.read and number not in known.answers
            if is_new:
                known.answers[number] = None
            return is_new

    def put(self, client: str, number: int, answer: dict[str, Any]) -> None:
        with self._lock:
            known = self._clients[client]
            if number in known.answers:  # Otherwise it is not waited for any more.
                known.answers[number] = answer

    def answer(self, client: str, number: int) -> dict[str, Any] | None:
        """The answer to a request that has come; None if it is not done yet."""
        with self._lock:
            return self._clients[client].answers.get(number, _LATE)

    def __len__(self) -> int:
        return sum(len(client.answers) for client in self._clients.values())


class _Client:
    """The last number up to which a client has all answers, and its requests beyond."""

    def __init__(self) -> None:
        self.read = 0
        self.answers: dict[int, dict[str, Any] | None] = {}

    def forget(self, read: int) -> None:
        if read > self.read:
            self.read = read
            self.answers = {n: answer for n, answer in self.answers.items() if n > read}


# Requests to a table server by its control channel, as JSON.


_ENDED = "CANCELLED", "UNAVAILABLE"
_AWAY = *_ENDED, "DEADLINE_EXCEEDED"
_ATTEMPT_SECONDS = 10.0
_ANSWER_POLL_SECONDS = 0.02
_AWAY_SECONDS = 5.0
_ANOTHER_PROCESS = (
    "it has been started again, and holds nothing of this job any more. Start the whole job again. "
    "Received: an answer of another process than before"
)


class ControlLink:
    def __init__(self, name: str, address: str, secret: Secret, timeout: float) -> None:
        self.name, self.address = name, address
        self._timeout, self._tls = timeout, Tls.from_env()
        self._client = ChannelClient(control_address(address), self._tls)
        self._session = Session(secret, self._send)
        self._tickets = TicketBook()

    @property
    def nonce(self) -> str | None:
        return self._session.process

    @nonce.setter
    def nonce(self, nonce: str | None) -> None:
        self._session.process = nonce

    def request(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request; returns the answer, or raises TableServerError."""
        return self.begin(what, **arguments)()

    def begin(self, what: str, **arguments: Any) -> Callable[[], dict[str, Any]]:
        """Sends a request; returns a function that waits for the answer and returns it."""
        number = self._tickets.open()
        began = time.monotonic()
        last_heard = [began]

        def ask() -> dict[str, Any]:
            code, message, answer = self._ask(what, number, arguments)
            if code == BUSY:
                last_heard[0] = time.monotonic()
            if code == BUSY or (
                code in _ENDED and time.monotonic() < last_heard[0] + _AWAY_SECONDS
            ):
                return {"pending": True}
            if answer is None:
                kind = TableServerLostError if code in _AWAY else TableServerError
                raise kind(
                    f"{self.name} ({self.address}) does not answer as a table server of this job. "
                    "Look into its log. "
                    f"Received: {self._why(message)} at '{what}'"
                )
            last_heard[0] = time.monotonic()
            return answer

        def wait(answer: dict[str, Any]) -> dict[str, Any]:
            progress, deadline = 0, began + self._timeout
            while answer.get("pending"):
                # A long request may take its time as long as it goes on.
                if answer.get("progress", progress) != progress:
                    progress = answer["progress"]
                    deadline = time.monotonic() + self._timeout
                if time.monotonic() >= deadline:
                    raise TableServerLostError(
                        f"{self.name} ({self.address}) has not done what it was asked for in "
                        f"{self._timeout:g} s. Look into its log. Received: '{what}'"
                    )
                time.sleep(_ANSWER_POLL_SECONDS)
                answer = ask()
            if "error" in answer:
                kind = TableServerLostError if answer.get("lost") else TableServerError
                raise kind(f"{self.name} ({self.address}): {answer['error']}")
            return answer

        def wait_and_close(answer: dict[str, Any]) -> dict[str, Any]:
            try:
                return wait(answer)
            finally:
                self._tickets.close(number)

        try:
            first = ask()
        except BaseException:
            self._tickets.close(number)
            raise
        return lambda: wait_and_close(first)

    def _ask(
        self, what: str, number: int, arguments: dict[str, Any]
    ) -> tuple[str | None, str, dict[str, Any] | None]:
        ticket = self._tickets.ticket(number)
        request = json.dumps({"what": what, "ticket": ticket, **arguments})
        try:
            return None, "", json.loads(self._session.ask(request))
        except ChannelError as error:
            return error.code, str(error), None
        except RefusedError as error:
            return None, "", {"error": str(error)}
        except AnotherProcessError:
            return None, "", {"error": _ANOTHER_PROCESS, "lost": True}

    def _send(self, text: str) -> str:
        return self._client.send(text, min(self._timeout, _ATTEMPT_SECONDS))

    def _why(self, message: str) -> str:
        address = control_address(self.address)
        try:
            handshake.explain_tls(address, self._tls, message)
        except OSError as error:
            message = f"{error}"
        return f"{message.splitlines()[0]} on its control channel, {address},"


_SHUTDOWN_SECONDS = 3.0
_POLL_SECONDS = 0.2


class Servers:
    """The parameter servers of a job.

    One that cannot be reached is called again for `patience` seconds; with `recovers`, one that is
    started again is given what the one before had.
    """

    def __init__(
        self,
        task: TaskConfig,
        secret: Secret,
        timeout: float,
        patience: float,
        recovers: bool = False,
        has_begun: Callable[[], bool] = lambda: True,
    ) -> None:
        self._task, self._secret, self._has_begun = task, secret, has_begun
        self.peers = [
            (task_name(job, index), address) for job, index, address in task.tasks() if job == "ps"
        ]
        self._timeout, self._patience, self._recovers = timeout, patience, recovers
        # A server that takes the place of another one has to hear all of this.
        self._greeting: dict[str, Any] = {}
        self._made: list[tuple[str, dict[str, Any]]] = []
        self._assigned: collections.Counter[tuple[int, int]] = collections.Counter()
        # Links that reach whatever process is there; those of the stall inspector's thread.
        self._unnamed: dict[int, ControlLink] = {}
        self._watching: dict[int, ControlLink] = {}
        self._at_good_end: list[Callable[[], None]] = []
        self._control = [ControlLink(*peer, secret, timeout) for peer in self.peers]
        self._row_keys = [RowKey(secret) for _ in self.peers]
        # Of the servers' first processes, by which row keys go.
        self._first_processes: list[str | None] = [None] * len(self.peers)
        self._startup_timeout = timeout

    def __len__(self) -> int:
        return len(self.peers)

    def new_links(self) -> list[RpcClient]:
        return [
            RpcClient(*peer, self._timeout, self._patience, self._recovers, key, self._has_begun)
            for peer, key in zip(self.peers, self._row_keys)
        ]

    def greet(self, agreed: str, replicas: int, timeout: float) -> None:
        """Says hello to all servers, and goodbye when this process ends well.

        The text `agreed`, and the number of replicas, have to be equal in all processes of the job.
        """
        self._startup_timeout = timeout
        own = {"worker": self._task.name, "process": own_id()}
        self._greeting = {"agreed": agreed, "replicas": replicas, **own}
        deadline = time.monotonic() + timeout
        for index in range(len(self)):
            answer = self._greet(index, deadline)
            self._control[index].nonce = answer["nonce"]
            self._first_processes[index] = answer["first_process"]
            self._row_keys[index].set(answer["first_process"])
        if self._task.is_chief:
            signals.watch()
            atexit.register(self._at_exit)

    def _greet(self, index: int, deadline: float) -> dict[str, Any]:
        name, address = self.peers[index]
        while True:
            # Before it is called: a client whose call has failed waits longer each time.
            self._wait_until(lambda: handshake.listens(address), name, address, deadline)
            try:
                answer = self._control[index].request("hello", **self._greeting)
            except TableServerError as error:
                raise ClusterStartupError(f"{error}") from None
            if not answer.get("is_of_earlier_start"):
                return answer
            logger.warning(
                "%s (%s) has the tables of an earlier start of this job, and ends: waiting for "
                "the one that is started in its place",
                name,
                address,
            )
            self._wait_until(lambda: not handshake.listens(address), name, address, deadline)
            self._control[index] = ControlLink(name, address, self._secret, self._timeout)

    def _wait_until(
        self, is_so: Callable[[], bool], name: str, address: str, deadline: float
    ) -> None:
        while not is_so():
            if time.monotonic() >= deadline:
                raise ClusterStartupError(
                    f"{name} did not come to {address} within {self._startup_timeout:g} s. Start "
                    "it, or read its log if it has ended. "
                    f"Received: TF_CONFIG={self._task.to_tf_config()}"
                )
            time.sleep(_POLL_SECONDS)

    def at_good_end(self, function: Callable[[], None]) -> None:
        self._at_good_end.append(function)

    def make(self, what: str, **arguments: Any) -> None:
        """Has all servers make something, and waits until it can be called."""
        self.ask_all(what, **arguments)
        self._made.append((what, arguments))

    def serve(self, key: int, group: str) -> None:
        """Has all servers serve a further group of a table's methods."""
        try:
            self.ask_all("serve", key=key, group=group)
        except TableServerLostError:
            # One that takes another's place serves all of them.
            if not self._recovers:
                raise

    def ask_all(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        answers, errors, waits = [], [], []
        for link in self._control:
            try:
                waits.append(link.begin(what, **arguments))
            except TableServerError as error:
                errors.append(error)
        for wait in waits:
            try:
                answers.append(wait())
            except TableServerError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def find_restarted(self, index: int) -> ControlLink | None:
        """Connects to a server that has restarted; returns None if it has not."""
        if index not in self._unnamed:
            self._unnamed[index] = ControlLink(*self.peers[index], self._secret, self._timeout)
        nonce = self._unnamed[index].request("who")["nonce"]
        if nonce == self._control[index].nonce:
            return None
        link = self._unnamed.pop(index)
        link.nonce = nonce
        return link

    def recover(self, index: int, link: ControlLink, load: dict[str, Any]) -> None:
        """Gives a server in another's place what that had, and rows to `load`."""
        assigned = [(*where, count) for where, count in self._assigned.items()] if not index else []
        link.request(
            "recover",
            greeting=self._greeting,
            first_process=self._first_processes[index],
            made=self._made,
            assigned=assigned,
            load=load,
        )
        self._control[index] = link

    def pushes(self) -> list[list[int]]:
        found = []
        for index, peer in enumerate(self.peers):
            # From another thread than the one that trains.
            if index not in self._watching:
                self._watching[index] = ControlLink(*peer, self._secret, _SHUTDOWN_SECONDS)
            found += self._watching[index].request("pushes")["pushes"]
        return found

    @functools.cached_property
    def _preemption_links(self) -> list[ControlLink]:
        return [ControlLink(*peer, self._secret, _SHUTDOWN_SECONDS) for peer in self.peers]

    def are_told_to_end(self) -> bool:
        """Whether a server that can be reached has got SIGTERM; for one thread."""
        for link in self._preemption_links:
            with contextlib.suppress(TableServerError):
                if link.request("who")["is_told_to_end"]:
                    return True
        return False

    def count_assignment(self, key: int, slot: int) -> None:
        self._assigned[key, slot] += 1
        self._control[0].request("assigned", key=key, slot=slot)

    def assignments(self, key: int, slot: int) -> int:
        return self._control[0].request("assignments", key=key, slot=slot)["count"]

    def wait_for_assignment(self, key: int, slot: int, count: int, name: str) -> None:
        """Waits, for as long as a start, until that has been said so often."""
        deadline = time.monotonic() + self._startup_timeout
        while self.assignments(key, slot) < count:
            if time.monotonic() >= deadline:
                raise TableServerError(
                    f"{self._task.name} has assigned the table '{name}', and the chief, whose "
                    f"value counts, has not in {self._startup_timeout:g} s. All workers must load "
                    f"or set weights at the same point of the script. Received: slot {slot}"
                )
            time.sleep(_POLL_SECONDS)

    def _at_exit(self) -> None:
        if signals.is_bad():
            return
        for function in self._at_good_end:
            function()
        for name, address in self.peers:
            try:
                ControlLink(name, address, self._secret, _SHUTDOWN_SECONDS).request("shutdown")
            except TableServerError:
                pass  # It has ended, or hangs.


class StallProbe(liveness.StallProbe):
    """Probe of `stalls.Inspector` on a worker."""

    def __init__(
        self,
        task: TaskConfig,
        progress: Progress,
        marks: StepMarks,
        world: World,
        is_sync: bool,
        servers: Callable[[], Servers],
    ) -> None:
        super().__init__(task, progress, marks)
        self._world, self._is_sync, self._servers = world, is_sync, servers

    def describe(self, entered: int) -> str:
        servers = self._servers()
        silent = stalls.unresponsive_tasks(dict(servers.peers))
        if silent:
            return f"a table; not arrived: {', '.join(silent)} (no answer)"
        if self._is_sync and self._is_ahead(servers.pushes()):
            return f"the barrier of the tables; not arrived: {self.missing(entered)}"
        return super().describe(entered)

    def _is_ahead(self, pushes: Iterable[Sequence[int]]) -> bool:
        """Whether this worker has pushed at a step at which another one has not."""
        own = range(self._world.rank, self._world.rank + self._world.local_replicas)
        return any(max(of_table[i] for i in own) > min(of_table) for of_table in pushes)
