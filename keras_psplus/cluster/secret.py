"""Challenge-response authentication by a job's token, which is never sent.

A caller opens a session with a random number, and receives one that only this process can have
made. Both numbers and the token determine the key that signs every request and every answer of the
session. An eavesdropper learns neither the token nor how to sign a request.
"""

import hashlib
import hmac
import json
import secrets
import uuid
from collections.abc import Callable
from typing import Any


class RefusedError(Exception):
    """The other end refuses, because it has another token."""


class AnotherProcessError(Exception):
    """Another process than the one that is meant answers."""


class Secret:
    """A job's token.

    Args:
        token: Text.
    """

    def __init__(self, token: str) -> None:
        self._key = hashlib.sha256(b"keras_psplus job token " + token.encode()).digest()

    def sign(self, *texts: str) -> bytes:
        """The signature of texts, as bytes."""
        return hmac.digest(self._key, json.dumps(texts).encode(), "sha256")

    def key_words(self, *texts: str) -> list[int]:
        """Two integers of 64 bits that only who knows the token can name."""
        signature = self.sign("words", *texts)
        return [int.from_bytes(signature[i : i + 8], "big", signed=True) for i in (0, 8)]


class Authenticator:
    """Lets requests in that are signed with the job's token.

    It keeps nothing of a caller before that, so that nobody can fill it.

    Args:
        secret: `Secret`.
        refusal: What to say to a caller with another token.
    """

    def __init__(self, secret: Secret, refusal: str) -> None:
        self._secret, self._refusal = secret, refusal
        self._own = secrets.token_bytes(32)
        # Tells this process from another one at the same address.
        self.process = uuid.uuid4().hex

    def answer(
        self, text: str, handle: Callable[[str], str], hint: Callable[[], Any] = lambda: None
    ) -> str:
        """Answers a message.

        Args:
            text: The message.
            handle: Function of a request's text that returns the answer's.
            hint: Function that returns what anybody is told who opens a session.

        Returns:
            Text.
        """
        try:
            message = json.loads(text)
            if "open" in message:
                session = self._new_session(str(message["open"]))
                opened = {"session": session, "process": self.process, "hint": hint()}
                return json.dumps(opened)
            caller, session, body, proof = (
                str(message[key]) for key in ("caller", "session", "body", "proof")
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return json.dumps({"error": f"This is no request. Received: {error}"[:300]})
        if not is_same(session, self._new_session(caller, session.partition(".")[0])):
            return json.dumps({"unknown": True})
        signature = self._secret.sign("request", caller, session, self.process, body).hex()
        if not is_same(proof, signature):
            return json.dumps({"error": self._refusal})
        answer = handle(body)
        return json.dumps({"body": answer, "proof": _of_answer(self._secret, signature, answer)})

    def _new_session(self, caller, number=None):
        number = secrets.token_hex(16) if number is None else number
        text = json.dumps([caller, number]).encode()
        return f"{number}.{hmac.digest(self._own, text, 'sha256').hex()}"


class Session:
    """A caller's side of a `Authenticator`.

    Args:
        secret: `Secret`.
        send: Function of a message's text that returns the answer's.
        process: That of the gate which is meant; None for whichever is there.
    """

    def __init__(
        self, secret: Secret, send: Callable[[str], str], process: str | None = None
    ) -> None:
        self._secret, self._send = secret, send
        self.process = process
        self._opened: tuple[str, str, str] | None = None

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
        for _ in range(2):
            if self._opened is None:
                self.open()
            answer, signature = self._ask(body)
            if not answer.get("unknown"):
                break
            # The process is another one than that with which it was opened.
            self._opened = None
        text, proof = str(answer.get("body")), str(answer.get("proof"))
        if not is_same(proof, _of_answer(self._secret, signature, text)):
            raise RefusedError(
                "what answers does not know this job's token. Received: an answer without proof"
            )
        return text

    def _ask(self, body):
        caller, session, process = self._opened
        signature = self._secret.sign("request", caller, session, process, body).hex()
        message = {"caller": caller, "session": session, "body": body, "proof": signature}
        return self._read(self._send(json.dumps(message))), signature

    def _read(self, text):
        try:
            answer = dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            answer = {}
        if "error" in answer:
            raise RefusedError(str(answer["error"]))
        return answer


def _of_answer(secret, signature, text):
    return secret.sign("answer", signature, text).hex()


def is_same(one: str, other: str) -> bool:
    """Whether two texts are the same; how long that takes tells nothing of them."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
