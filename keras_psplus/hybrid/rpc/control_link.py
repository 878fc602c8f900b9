"""Requests to a table server by its control channel, as JSON."""

import json
import time
from collections.abc import Callable
from typing import Any

from keras_psplus.cluster.channel.client import BUSY, ChannelClient, ChannelError
from keras_psplus.cluster.channel.sessions import AnotherProcessError, RefusedError, Session
from keras_psplus.cluster.channel.tls import Tls
from keras_psplus.cluster.ports import control_address
from keras_psplus.cluster.secret import Secret
from keras_psplus.cluster.wire import handshake
from keras_psplus.errors import TableServerError, TableServerLostError
from keras_psplus.hybrid.rpc.tickets import TicketBook

_ENDED = "CANCELLED", "UNAVAILABLE"
_AWAY = *_ENDED, "DEADLINE_EXCEEDED"
_ATTEMPT_SECONDS = 10.0
_POLL_SECONDS = 0.02
_AWAY_SECONDS = 5.0
_ANOTHER_PROCESS = (
    "it has been started again, and holds nothing of this job any more. Start the whole job again. "
    "Received: an answer of another process than before"
)


class ControlLink:
    """Requests that are not part of training steps.

    Args:
        name: The server's task name, such as `"ps-0"`.
        address: Its `host:port`.
        secret: `secret.Secret` of the job's token.
        timeout: Seconds that a request may take without progress.
    """

    def __init__(self, name: str, address: str, secret: Secret, timeout: float) -> None:
        self.name, self.address = name, address
        self._timeout, self._tls = timeout, Tls.from_env()
        self._client = ChannelClient(control_address(address), self._tls)
        self._session = Session(secret, self._send)
        self._tickets = TicketBook()

    @property
    def nonce(self) -> str | None:
        """Nonce of the server's process, once it is known."""
        return self._session.process

    @nonce.setter
    def nonce(self, nonce: str | None) -> None:
        self._session.process = nonce

    def request(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and returns the answer, a dict.

        Raises:
            TableServerError: If it is refused, or there is no answer in time.
        """
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
                time.sleep(_POLL_SECONDS)
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
