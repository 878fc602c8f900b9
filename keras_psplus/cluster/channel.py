"""Control channel of tasks: signed messages over gRPC, by TLS if it is asked for."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import itertools
import json
import os
import secrets
import socket
import ssl
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn, Self

from keras_psplus.cluster.config import ClusterConfigError, TaskConfig, split_address
from keras_psplus.cluster.environment import TOKEN_VARIABLE

# TLS of the control channel, by the files that the environment names.
#
# With a certificate authority both ends show certificates that it has signed (mutual TLS). Without
# one, all tasks have the same certificate, which is the one that they trust.

# The module `grpc`, imported when the first channel is made.
#
# It is another copy of gRPC than TensorFlow's own, in the same process. A process that has forked
# (`process/warm.py`) has not imported it.


# Read once, by gRPC's core. It would say on stderr what is said in errors here, and would look
# after channels at each fork of the process: none of ours is used across one.
_AT_IMPORT = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
_loading = threading.Lock()


def load_grpc() -> Any:
    """Imports `grpc`; the environment stays as it is."""
    with _loading:  # Two threads at once would take each other's environment for the user's.
        module, pid = _load_grpc()
    if pid != os.getpid():
        raise RuntimeError(
            f"Process {os.getpid()} is a fork of one that has joined a cluster, and cannot join "
            "another. Fork before the strategy is made, or start a new process (`spawn`). "
            f"Received: a fork of process {pid}"
        )
    return module


@functools.cache
def _load_grpc() -> tuple[ModuleType, int]:
    added = {name: value for name, value in _AT_IMPORT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        import grpc
    finally:
        for name in added:
            del os.environ[name]
    return grpc, os.getpid()


CERT, KEY, CA = "KERAS_PSPLUS_TLS_CERT", "KERAS_PSPLUS_TLS_KEY", "KERAS_PSPLUS_TLS_CA"
# Name in all certificates; without it, each has the host's in its task's address.
NAME = "KERAS_PSPLUS_TLS_NAME"


@dataclasses.dataclass(frozen=True)
class Tls:
    """Contents of the files of one process.

    Attributes:
        cert: This task's certificate, with those that lead to the authority.
        ca: Certificates of the authority; None without one.
        name: Name in all certificates; None if each has its host's.
    """

    cert: bytes
    key: bytes = dataclasses.field(repr=False)
    ca: bytes | None
    name: str | None

    @classmethod
    def from_env(cls) -> Self | None:
        """Reads the files that the environment names; None if it names none."""
        paths = {name: os.environ.get(name, "") for name in (CERT, KEY, CA)}
        given = {**paths, NAME: os.environ.get(NAME, "")}
        received = "Received: " + ", ".join(f"{name}={text}" for name, text in given.items())
        if not any(given.values()):
            return None
        for name in (CERT, KEY):
            if not paths[name]:
                raise ClusterConfigError(
                    f"{name} is not set: TLS takes a certificate and its key ({CERT}, {KEY}), and "
                    f"{CA} for certificates of an authority. {received}"
                )
        contents = {name: _read_file(name, path, received) for name, path in paths.items() if path}
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                paths[CERT], paths[KEY], password=_no_password
            )
        except (ssl.SSLError, ValueError) as error:
            raise ClusterConfigError(
                f"{CERT} and {KEY} must be a certificate and its own key, in PEM files without a "
                f"password: {getattr(error, 'reason', None) or error}. {received}"
            ) from None
        try:
            ssl.create_default_context(cafile=paths[CA] or paths[CERT])
        except ssl.SSLError as error:
            raise ClusterConfigError(
                f"{CA} must be a PEM file of certificates: {error.reason or error}. {received}"
            ) from None
        return cls(contents[CERT], contents[KEY], contents.get(CA), given[NAME] or None)

    def of_server(self) -> Any:
        """Returns gRPC's credentials of a server."""
        return load_grpc().ssl_server_credentials(
            [(self.key, self.cert)],
            root_certificates=self.ca,
            require_client_auth=self.ca is not None,
        )

    def of_caller(self) -> Any:
        """Returns gRPC's credentials of a caller."""
        return load_grpc().ssl_channel_credentials(self.ca or self.cert, self.key, self.cert)


def speaks_tls(address: str, timeout: float) -> bool:
    """Whether what listens at `host:port` answers a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError):
        with socket.create_connection(split_address(address), timeout) as connection:
            with context.wrap_socket(connection):
                return True
    return False


def _read_file(name: str, path: str, received: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ClusterConfigError(
            f"The file in {name} cannot be read: {error.strerror}. {received}"
        ) from None


def _no_password() -> NoReturn:
    raise ValueError("the key has a password")


# Sessions of requests that are signed by a job's secret, which is never sent.

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
#                                ----------->
#                                <-----------      session: a random number; id of its process
#       caller, number,
#       request, proof           ----------->
#                                <-----------      answer, proof
#
# A proof is the signature, by the job's secret, of the session, the process, the caller's own
# random number, the request's number and its text; that of an answer covers the request's proof as
# well. A server takes each number of a caller once, and begins another session for all before it
# forgets which it has taken. So nothing that somebody has overheard can be used again, in either
# direction, and a server reads no request of a caller who does not know the secret. It keeps
# nothing of such a caller either.

_MOST_REQUESTS = 1 << 14  # of a session
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
    """

    def __init__(self, secret: Secret, refusal: str) -> None:
        self._secret, self._refusal = secret, refusal
        # Tells this process from another one at the same address.
        self.process = uuid.uuid4().hex
        self._session, self._seen = secrets.token_hex(16), set[tuple[str, str]]()
        self._lock = threading.Lock()

    def answer(
        self,
        text: str,
        handle: Callable[[str], str],
        hint: Callable[[], Any] = lambda: None,
        refuse: Callable[[], None] = lambda: None,
    ) -> str:
        """Answers a message."""
        try:
            message = json.loads(text)
            if "open" in message:
                opened = {"session": self._session, "process": self.process, "hint": hint()}
                return json.dumps(opened)
            caller, session, number, body, proof = (str(message[key]) for key in _FIELDS)
            signature = _of_request(self._secret, caller, session, self.process, number, body)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return json.dumps({"error": f"This is no request. Received: {error}"[:300]})
        if session == self._session and not is_same(proof, signature):
            refuse()
            return json.dumps({"error": self._refusal})
        if not self._takes(session, caller, number):
            return json.dumps({"unknown": True})
        answer = handle(body)
        return json.dumps({"body": answer, "proof": _of_answer(self._secret, signature, answer)})

    def _takes(self, session: str, caller: str, number: str) -> bool:
        """Notes a request of the session; False for one that has come before."""
        with self._lock:
            if session != self._session or (caller, number) in self._seen:
                return False
            self._seen.add((caller, number))
            if len(self._seen) >= _MOST_REQUESTS:
                self._session = secrets.token_hex(16)
                self._seen.clear()
            return True


class Session:
    """A caller's side of a `Authenticator`."""

    def __init__(
        self, secret: Secret, send: Callable[[str], str], process: str | None = None
    ) -> None:
        self._secret, self._send = secret, send
        self.process = process
        self._opened: tuple[str, str] | None = None
        self._caller, self._numbers = secrets.token_hex(16), itertools.count(1)

    def open(self) -> Any:
        """Opens the session; returns the gate's hint."""
        answer = self._read(self._send(json.dumps({"open": True})))
        session, process = str(answer.get("session")), str(answer.get("process"))
        if self.process not in (None, process):
            raise AnotherProcessError
        self._opened = session, process
        return answer.get("hint")

    def ask(self, body: str) -> str:
        """Sends a request's text and returns the answer's.

        Raises:
            AnotherProcessError: If another process answers than the one that is meant.
            RefusedError: If the other end has another token.
        """
        opened = self._opened
        for _ in range(3):
            if opened is None:
                self.open()
                opened = self._opened
                assert opened is not None
            answer, signature = self._ask(opened, body)
            if not answer.get("unknown"):
                break
            # The process is another one than that with which it was opened, or has another session.
            opened = None
        text, proof = str(answer.get("body")), str(answer.get("proof"))
        if not is_same(proof, _of_answer(self._secret, signature, text)):
            raise RefusedError(
                "what answers does not know this job's token. Received: an answer without proof"
            )
        return text

    def _ask(self, opened: tuple[str, str], body: str) -> tuple[dict[str, Any], str]:
        (session, process), caller, number = opened, self._caller, next(self._numbers)
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


# Ends of the control channel: messages over gRPC.

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
    """

    def __init__(
        self,
        address: str,
        gate: Authenticator,
        handle: Callable[[str, str], str],
        hint: Callable[[], Any] = lambda: None,
        refuse: Callable[[str], None] = lambda host: None,
    ) -> None:
        grpc = load_grpc()
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
    """gRPC's options by which a connection's end notices that the other is silent."""
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
    """Sends messages to one server; connects when the first is sent."""

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
        """Sends a message and returns the answer's text."""
        grpc, message = load_grpc(), text.encode()
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
        grpc = load_grpc()
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
        """Waits until a task has been connected more often; returns how often it has."""
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
