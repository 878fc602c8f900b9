"""Sessions of requests that are signed by a job's secret, which is never sent."""

import dataclasses
import hashlib
import hmac
import itertools
import json
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Self

from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.environment import TOKEN_VARIABLE

# Secrets that the tasks of a job share, and never send.


class Secret:
    """A job's token."""

    def __init__(self, token: str) -> None:
        self._key = hashlib.sha256(b"keras_psplus job token " + token.encode()).digest()

    def sign(self, *texts: str) -> bytes:
        return hmac.digest(self._key, json.dumps(texts).encode(), "sha256")

    def key_words(self, *texts: str) -> list[int]:
        """Two integers of 64 bits that only who knows the token can name."""
        signature = self.sign("words", *texts)
        return [int.from_bytes(signature[i : i + 8], "big", signed=True) for i in (0, 8)]


def is_same(one: str, other: str) -> bool:
    """Whether two texts are the same; how long that takes tells nothing of them."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


# Challenge-response authentication by a job's secret, which is never sent.
#
#     caller                                     server
#       random number            ----------->
#                                <-----------      session: another one; id of its process
#       number, request, proof   ----------->
#                                <-----------      answer, proof
#
# A proof is the signature, by the job's secret, of both random numbers, the process, the request's
# number and its text; that of an answer covers the request's proof as well. So nothing that
# somebody has overheard can be used again, in either direction, and a server reads no request of a
# caller who does not know the secret. It keeps nothing of such a caller either.


# Seconds from a session's opening to its first request, requests of one that may overtake each
# other, and sessions that a server knows before it forgets those that began earlier.
_TO_BEGIN, _WINDOW, _MOST_SESSIONS = 60.0, 256, 4096
_FIELDS = "caller", "session", "number", "body", "proof"


class RefusedError(Exception):
    """The other end refuses, because it has another token."""


class AnotherProcessError(Exception):
    """Another process than the one that is meant answers."""


@dataclasses.dataclass(frozen=True)
class JobSecret:
    """The secret by which the tasks of a job know each other.

    Attributes:
        secret: The `Secret` of the job's token; without a token, of what all of its tasks know.
    """

    secret: Secret
    is_token: bool

    @classmethod
    def of(cls, config: TaskConfig) -> Self:
        return cls.of_text(json.dumps(config.cluster, sort_keys=True))

    @classmethod
    def of_text(cls, known: str) -> Self:
        """Makes the secret of processes that all know a text."""
        token = os.environ.get(TOKEN_VARIABLE)
        return cls(Secret(token or known), bool(token))


class Authenticator:
    """Lets requests in that are signed with the job's token.

    It keeps nothing of a caller before that, so that nobody can fill it.

    Args:
        refusal: What to say to a caller with another token.
    """

    def __init__(self, secret: Secret, refusal: str) -> None:
        self._secret, self._refusal = secret, refusal
        self._own = secrets.token_bytes(32)
        # Tells this process from another one at the same address.
        self.process = uuid.uuid4().hex
        self._began = time.monotonic()
        # The numbers of the last requests in each session of who knows the token.
        self._seen: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def answer(
        self,
        text: str,
        handle: Callable[[str], str],
        hint: Callable[[], Any] = lambda: None,
        refuse: Callable[[], None] = lambda: None,
    ) -> str:
        """Answers a message.

        Args:
            handle: Function of a request's text that returns the answer's.
            hint: Function that returns what anybody is told who opens a session.
            refuse: Function that is called for a request without a proof.
        """
        try:
            message = json.loads(text)
            if "open" in message:
                session = self._new_session(
                    str(message["open"]), secrets.token_hex(16), self._now()
                )
                opened = {"session": session, "process": self.process, "hint": hint()}
                return json.dumps(opened)
            caller, session, number, body, proof = (str(message[key]) for key in _FIELDS)
            random, opened_at, _ = session.split(".")
            is_mine = is_same(session, self._new_session(caller, random, int(opened_at)))
            signature = _of_request(self._secret, caller, session, self.process, number, body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return json.dumps({"error": f"This is no request. Received: {error}"[:300]})
        if not is_mine:
            return json.dumps({"unknown": True})
        if not is_same(proof, signature):
            refuse()
            return json.dumps({"error": self._refusal})
        if not self._is_new(session, int(opened_at), int(number)):
            return json.dumps({"unknown": True})
        answer = handle(body)
        return json.dumps({"body": answer, "proof": _of_answer(self._secret, signature, answer)})

    def _is_new(self, session: str, opened_at: int, number: int) -> bool:
        """Notes a request; False for one that has come before, or much too late."""
        with self._lock:
            if session not in self._seen:
                now = self._now()
                if now - opened_at > _TO_BEGIN:
                    return False
                if len(self._seen) >= _MOST_SESSIONS:
                    # They are opened again; nothing of them is taken for a first request.
                    self._seen = {
                        one: numbers
                        for one, numbers in self._seen.items()
                        if now - int(one.split(".")[1]) <= _TO_BEGIN
                    }
                self._seen[session] = set()
            seen = self._seen[session]
            is_new = number not in seen and number > max(seen, default=0) - _WINDOW
            if is_new:
                seen.add(number)
                if len(seen) > 2 * _WINDOW:
                    self._seen[session] = {one for one in seen if one > max(seen) - _WINDOW}
            return is_new

    def _now(self) -> int:
        return int(time.monotonic() - self._began)

    def _new_session(self, caller: str, random: str, opened_at: int) -> str:
        text = json.dumps([caller, random, opened_at]).encode()
        return f"{random}.{opened_at}.{hmac.digest(self._own, text, 'sha256').hex()}"


class Session:
    """A caller's side of a `Authenticator`.

    Args:
        send: Function of a message's text that returns the answer's.
        process: That of the gate which is meant; None for whichever is there.
    """

    def __init__(
        self, secret: Secret, send: Callable[[str], str], process: str | None = None
    ) -> None:
        self._secret, self._send = secret, send
        self.process = process
        self._opened: tuple[str, str, str] | None = None
        self._numbers = itertools.count(1)

    def open(self) -> Any:
        """Opens the session; returns the gate's hint.

        Raises:
            AnotherProcessError: If another process answers than the one that is meant.
        """
        caller = secrets.token_hex(16)
        answer = self._read(self._send(json.dumps({"open": caller})))
        session, process = str(answer.get("session")), str(answer.get("process"))
        if self.process not in (None, process):
            raise AnotherProcessError
        self._opened = caller, session, process
        return answer.get("hint")

    def ask(self, body: str) -> str:
        """Sends a request's text and returns the answer's.

        Raises:
            AnotherProcessError: If another process answers than the one that is meant.
            RefusedError: If the other end has another token.
        """
        opened = self._opened
        for _ in range(2):
            if opened is None:
                self.open()
                opened = self._opened
                assert opened is not None
            answer, signature = self._ask(opened, body)
            if not answer.get("unknown"):
                break
            # The process is another one than that with which it was opened, or has forgotten it.
            opened = None
        text, proof = str(answer.get("body")), str(answer.get("proof"))
        if not is_same(proof, _of_answer(self._secret, signature, text)):
            raise RefusedError(
                "what answers does not know this job's token. Received: an answer without proof"
            )
        return text

    def _ask(self, opened: tuple[str, str, str], body: str) -> tuple[dict[str, Any], str]:
        caller, session, process = opened
        number = next(self._numbers)
        signature = _of_request(self._secret, caller, session, process, str(number), body)
        message = dict(zip(_FIELDS, (caller, session, number, body, signature)))
        return self._read(self._send(json.dumps(message))), signature

    def _read(self, text: str) -> dict[str, Any]:
        try:
            answer = dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            answer = {}
        if "error" in answer:
            raise RefusedError(str(answer["error"]))
        return answer


def _of_request(
    secret: Secret, caller: str, session: str, process: str, number: str, body: str
) -> str:
    return secret.sign("request", caller, session, process, number, body).hex()


def _of_answer(secret: Secret, signature: str, text: str) -> str:
    return secret.sign("answer", signature, text).hex()
