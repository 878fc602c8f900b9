"""Client of the control channel."""

import collections
import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from keras_psplus.cluster.channel import tls as grpc_module
from keras_psplus.cluster.channel.server import LEAST_PING_SECONDS, LONGEST, METHOD, keepalive
from keras_psplus.cluster.channel.tls import Tls

# Of a server that has too many calls at once.
BUSY = "RESOURCE_EXHAUSTED"
_PING_SECONDS = 15.0
_CONNECT_SECONDS = 5.0


class ChannelError(OSError):
    """A call has not been answered.

    Attributes:
        code: Name of gRPC's status, such as `"UNAVAILABLE"`.
    """

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{details or code}")
        self.code = code


class ChannelClient:
    """Sends messages to one server; connects when the first is sent.

    Args:
        address: The server's `host:port`.
        tls: `Tls` of this process, or None for a plain connection.
        ping: Seconds after which the server is asked for a sign of life, and that it has for it.
    """

    def __init__(self, address: str, tls: Tls | None, ping: float = _PING_SECONDS) -> None:
        self._address, self._tls, self._ping = address, tls, ping
        self._channel: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; the next message opens another one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(self, text: str, timeout: float) -> str:
        """Sends a message and returns the answer's text.

        Raises:
            ChannelError: If there is none.
        """
        grpc, message = grpc_module.load(), text.encode()
        if len(message) > LONGEST:
            raise ChannelError(
                "INVALID_ARGUMENT", f"a message of {len(message)} bytes is larger than {LONGEST}"
            )
        self._channel = self._channel or self._connect(grpc)
        try:
            answer = self._channel.unary_unary(METHOD)(message, timeout=timeout)
        except grpc.RpcError as error:
            raise ChannelError(error.code().name, error.details()) from None
        return answer.decode(errors="replace")

    def watch(self, note: Callable[[bool], None]) -> None:
        """Stays connected from now on, also while nothing is sent.

        Args:
            note: Function that a thread calls with True when the connection has been made, and with
                False when it is broken or closed.
        """
        grpc = grpc_module.load()
        self._channel = channel = self._channel or self._connect(grpc)

        def on_change(state: Any) -> None:
            note(state is grpc.ChannelConnectivity.READY)
            if state is grpc.ChannelConnectivity.IDLE:
                # The server has closed it: gRPC asks to be asked.
                channel.subscribe(_ignore, try_to_connect=True)
                channel.unsubscribe(_ignore)

        channel.subscribe(on_change, try_to_connect=True)

    def _connect(self, grpc: Any) -> Any:
        options: list[tuple[str, int | str]] = [
            # As TCP would: tasks are named by addresses that lead to each other.
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            *keepalive(self._ping, self._ping),
            # While nothing is sent, too.
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.min_reconnect_backoff_ms", int(1000 * _CONNECT_SECONDS)),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self._tls is None:
            return grpc.insecure_channel(self._address, options)
        if self._tls.name is not None:
            options.append(("grpc.ssl_target_name_override", self._tls.name))
        return grpc.secure_channel(self._address, self._tls.of_caller(), options)


def _ignore(_: Any) -> None:
    pass


# Connections to tasks' control channels that gRPC's keepalive watches.
#
# gRPC's threads answer a ping whatever the process computes. A connection breaks at once when a
# process is killed, and within two pings when it is stopped or cut off; gRPC then connects again by
# itself, as soon as something answers there.


_KEEPALIVE_SECONDS = 2.0


class ConnectionWatch:
    """Notes since when which connections are broken.

    What has never been reached counts as nothing: a firewall may close the channel's port.

    Args:
        addresses: Dict from tasks' names to addresses of their control channels.
        timeout: Seconds that a silence may last, within which it has to be noted.
    """

    def __init__(self, addresses: Mapping[str, str], timeout: float) -> None:
        ping = max(LEAST_PING_SECONDS, min(_KEEPALIVE_SECONDS, timeout / 4))
        # Until the ping that was not answered, and for the answer.
        self._unnoticed = min(2 * ping, timeout / 2)
        self._changed = threading.Condition()
        self._made: collections.Counter[str] = collections.Counter()
        self._broken: dict[str, float] = {}
        tls = Tls.from_env()
        self._clients = {name: ChannelClient(a, tls, ping) for name, a in addresses.items()}
        for name, client in self._clients.items():
            client.watch(functools.partial(self._note, name))

    def silences(self) -> dict[str, float]:
        """Seconds for which tasks may have been silent whose connections are broken, by names."""
        now = time.monotonic()
        with self._changed:
            return {name: now - since + self._unnoticed for name, since in self._broken.items()}

    def wait_for_connection(self, name: str, made: int) -> int:
        """Waits until a task has been connected more often; returns how often it has.

        Args:
            made: How often it had been, as far as is known; 0 at first.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._made[name] > made)
            return self._made[name]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _note(self, name: str, is_connected: bool) -> None:
        with self._changed:
            if is_connected:
                self._made[name] += 1
                self._broken.pop(name, None)
            elif self._made[name]:
                self._broken.setdefault(name, time.monotonic())
            self._changed.notify_all()
