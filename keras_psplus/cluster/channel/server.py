"""Server of the control channel: one method, which answers signed messages.

What anybody can make it do is bounded: messages are small, calls few at once, and connections that
say nothing are closed.
"""

import concurrent.futures
import urllib.parse
from collections.abc import Callable
from typing import Any

from keras_psplus.cluster.channel import tls as grpc_module
from keras_psplus.cluster.channel.sessions import Authenticator
from keras_psplus.cluster.channel.tls import Tls

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
