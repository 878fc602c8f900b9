"""Ends of the control channel: messages over gRPC."""

import collections
import concurrent.futures
import functools
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Self

from keras_psplus.cluster.channel import tls as grpc_module
from keras_psplus.cluster.channel.sessions import Authenticator
from keras_psplus.cluster.channel.tls import Tls

# Server of the control channel: one method, which answers signed messages.
#
# Bounds for strangers: messages are small, calls few at once, and connections that say nothing are
# closed.


METHOD = "/keras_psplus.Control/Call"
_THREADS, _MOST_CALLS = 8, 64
LONGEST = 1 << 20  # bytes: what describes some thousand tasks or tables
_HANDSHAKE_SECONDS, _IDLE_SECONDS, _KEEPALIVE_SECONDS, _ALIVE_SECONDS = 5, 40, 10, 10
_MOST_CONNECTIONS = 4096
# Of a client that asks more often, the connection is closed.
LEAST_PING_SECONDS = 0.2


class ChannelServer:
    """Listens for signed requests until it is closed.

    Args:
        address: `host:port` to listen on, such as `"[::]:2222"` for all interfaces.
        handle: Function of a request's text and of the caller's host that returns the answer's.
        hint: Function that returns what anybody is told who calls.
        refuse: Function of the host of a caller without a proof.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        gate: Authenticator,
        handle: Callable[[str, str], str],
        hint: Callable[[], Any] = lambda: None,
        refuse: Callable[[str], None] = lambda host: None,
    ) -> None:
        grpc = grpc_module.load()
        tls = Tls.from_env()
        self._gate, self._handle, self._hint, self._refuse = gate, handle, hint, refuse
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "keras_psplus-channel")
        self._server = grpc.server(
            self._pool,
            maximum_concurrent_rpcs=_MOST_CALLS,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", LONGEST),
                ("grpc.max_metadata_size", 8192),
                ("grpc.max_allowed_incoming_connections", _MOST_CONNECTIONS),
                ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_SECONDS),
                ("grpc.max_connection_idle_ms", 1000 * _IDLE_SECONDS),
                *keepalive(_KEEPALIVE_SECONDS, _ALIVE_SECONDS),
                ("grpc.http2.min_ping_interval_without_data_ms", int(500 * LEAST_PING_SECONDS)),
            ],
        )
        answer = grpc.unary_unary_rpc_method_handler(self._answer)
        service, _, method = METHOD.strip("/").partition("/")
        methods = grpc.method_handlers_generic_handler(service, {method: answer})
        self._server.add_generic_rpc_handlers((methods,))
        try:
            if tls is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, tls.of_server())
        except RuntimeError as error:
            self._pool.shutdown()
            raise OSError(f"{error}") from None
        self._server.start()

    def close(self, patience: float = 0.5) -> None:
        """Stops listening; calls that have begun are answered within `patience` seconds."""
        self._server.stop(patience).wait()
        self._pool.shutdown(wait=False)

    def _answer(self, message: bytes, context: Any) -> bytes:
        host = _host_of(context.peer())
        return self._gate.answer(
            message.decode(errors="replace"),
            lambda body: self._handle(body, host),
            self._hint,
            lambda: self._refuse(host),
        ).encode()


def keepalive(seconds: float, timeout: float) -> list[tuple[str, int]]:
    """gRPC's options by which a connection's end notices that the other is silent.

    Args:
        seconds: Seconds without a byte after which it pings.
        timeout: Seconds that the other end has for the answer.
    """
    return [
        ("grpc.keepalive_time_ms", int(1000 * seconds)),
        ("grpc.keepalive_timeout_ms", int(1000 * timeout)),
        # By this one, of a minute, newer versions wait for the answer.
        ("grpc.http2.ping_timeout_ms", int(1000 * timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _host_of(peer: str) -> str:
    """The host in gRPC's words for a caller, such as `ipv6:%5B::1%5D:2222`."""
    host = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    return host.removeprefix("::ffff:")


# Client of the control channel.


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


_WATCH_SECONDS = 2.0


class ConnectionWatch:
    """Notes since when which connections are broken.

    What has never been reached counts as nothing: a firewall may close the channel's port.

    Args:
        addresses: Dict from tasks' names to addresses of their control channels.
        timeout: Seconds that a silence may last, within which it has to be noted.
    """

    def __init__(self, addresses: Mapping[str, str], timeout: float) -> None:
        ping = max(LEAST_PING_SECONDS, min(_WATCH_SECONDS, timeout / 4))
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
