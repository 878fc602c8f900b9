"""Idempotent requests: duplicates are counted once, in bounded memory of a server.

A client numbers its requests, and repeats those whose answers were lost. Each request has the
number up to which the client has all answers: those the server forgets, except for that number,
which identifies a request that arrives late, or that somebody has overheard and replays.
"""

import itertools
import threading
import uuid
from typing import Any

_LATE = {"error": "This request has had its answer. Received: a request that comes again"}


class TicketBook:
    """A client's side: numbers its requests."""

    def __init__(self) -> None:
        self._client, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._last, self._open, self._lock = 0, set[int](), threading.Lock()

    def open(self) -> int:
        """The number of a new request."""
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
        """Notes a request.

        Args:
            client: What tells its client from others.
            read: The number up to which the client has all answers.

        Returns:
            Whether it has not come before.
        """
        with self._lock:
            known = self._clients.setdefault(client, _Client())
            known.forget(read)
            is_new = number > known.read and number not in known.answers
            if is_new:
                known.answers[number] = None
            return is_new

    def put(self, client: str, number: int, answer: dict[str, Any]) -> None:
        """Keeps an answer until the client has it."""
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
