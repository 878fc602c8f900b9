"""Tasks that serve TensorFlow's runtime to the chief that has claimed them, until it ends."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from keras_psplus import versions
from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel import (
    Authenticator,
    ChannelClient,
    ChannelError,
    ChannelServer,
    RefusedError,
    Secret,
    Session,
    Tls,
)
from keras_psplus.cluster.config import (
    ClusterConfigError,
    ClusterStartupError,
    TaskConfig,
    split_address,
)
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.handshake import PeerIdentity
from keras_psplus.cluster.monitor import task_report
from keras_psplus.cluster.ports import control_address, port_holder
from keras_psplus.cluster.preflight import check_local_address
from keras_psplus.cluster.process import signals, tuning
from keras_psplus.errors import ChiefLostError
from keras_psplus.log import warn_once
from keras_psplus.process_identity import own_id

# Leases of serving tasks: a server belongs to the first chief that claims it.
#
# TensorFlow's servers accept requests from anybody, and two chiefs with the same servers wait for
# each other without end. So a chief claims its servers before it connects to them, by their control
# channels. A claim ends with its chief.


# The control channel of a task that serves TensorFlow, on a port of its own.

_CONNECT_SECONDS, _ANSWER_SECONDS = 2.0, 15.0


def listen(
    config: TaskConfig, gate: Authenticator, answer: Callable[[str, str], str], host: str = "[::]"
) -> ChannelServer:
    """Answers who knows the job's token, on the port of the task's control channel."""
    assert config.address is not None
    _, port = split_address(control_address(config.address))
    try:
        return ChannelServer(f"{host}:{port}", gate, answer)
    except OSError:
        raise ClusterStartupError(
            f"{config.name} cannot listen on port {port} for the control channel, which belongs to "
            f"its address {config.address}: {port_holder(port) or 'another process'} uses it. End "
            f"that, or give {config.name} another port. "
            f"Received: TF_CONFIG={config.to_tf_config()}"
        ) from None


def listen_to_chief(
    config: TaskConfig, functions: Mapping[str, Callable[..., Any]]
) -> ChannelServer:
    """Has functions called by a chief, by their names; their types are those of JSON."""
    gate = Authenticator(
        _secret(),
        f"{config.name} belongs to another job: its token differs. Start all tasks with the same "
        f"{TOKEN_VARIABLE}, or all without. Received: another token",
    )

    def answer(body: str, host: str) -> str:
        what, arguments = json.loads(body)
        return json.dumps(functions[what](**arguments))

    return listen(config, gate, answer)


def ask(task: str, what: str, arguments: dict[str, Any], timeout: float = _ANSWER_SECONDS) -> Any:
    """Calls a function of a task that serves.

    Raises:
        RefusedError: If the task has another token.
        ConnectionError: If nothing of this library answers there.
        TimeoutError: If the port cannot be reached, as behind a firewall.
        OSError: If the two disagree on TLS.
    """
    address, own_tls = control_address(task), Tls.from_env()
    try:
        handshake.connect(address, _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        raise
    except OSError as error:
        raise TimeoutError(f"{error}") from None
    with ChannelClient(address, own_tls) as client:
        session = Session(_secret(), lambda text: client.send(text, timeout))
        try:
            return json.loads(session.ask(json.dumps([what, arguments])))
        except ChannelError as error:
            handshake.explain_tls(address, own_tls, str(error))
            raise ConnectionError(f"{error}") from None


def _secret() -> Secret:
    # Without a token the first chief that comes has the servers all the same.
    return Secret(os.environ.get(TOKEN_VARIABLE) or "")


# From a claim until the chief's own server must accept connections.
_START_SECONDS = 30.0


class LeaseHolder:
    """Notes, in a task that serves, which chief it belongs to."""

    def __init__(self, leader: str) -> None:
        self._leader = leader
        self._holder: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def claim(self, who: str, host: str, process: str, address: str | None) -> str | None:
        """Gives this task to a chief, unless another one has it.

        Returns:
            None, or words that name the one that has it.
        """
        own = {"who": who, "host": host, "process": process, "address": address}
        with self._lock:
            holder = self._holder
            if holder is None or process == holder["process"] or self._is_free(own, holder):
                self._holder = {**own, "since": time.monotonic()}
                return None
            since = time.monotonic() - holder["since"]
            return f"{holder['who']}, which has claimed it {since:.0f} s ago"

    def _is_free(self, own: dict[str, Any], holder: dict[str, Any]) -> bool:
        if own["address"] and all(own[key] == holder[key] for key in ("address", "host")):
            return True  # Two processes cannot have the port: the other one has ended.
        is_starting = time.monotonic() < holder["since"] + _START_SECONDS
        return not is_starting and not handshake.listens(holder["address"] or self._leader)


class ServerLease:
    """A chief's side of `LeaseHolder`."""

    def __init__(
        self, cluster: Mapping[str, Sequence[str]], config: TaskConfig | None = None
    ) -> None:
        # A server that two jobs share by mistake is a ps more often than a worker.
        self.servers = {
            f"{job}-{index}": address
            for job in ("ps", "worker")
            for index, address in enumerate(cluster.get(job, ()))
        }
        self._config = config
        me = PeerIdentity.of(config) if config else PeerIdentity.of_chief()
        own = {"process": own_id(), "address": config.address if config else None}
        self._own = {"who": me.who, "host": me.host, **own}

    def claim_all(self, but: Collection[str] = ()) -> None:
        """Claims all servers."""
        first, *others = [name for name in self.servers if name not in but]
        self.claim(first)
        with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(self.claim, others))

    def claim(self, name: str) -> bool:
        """Claims one server; returns False if it knows nothing of claims, or cannot be asked."""
        address = self.servers[name]
        received = f"TF_CONFIG={self._config.to_tf_config()}" if self._config else address
        try:
            holder = ask(address, "claim", self._own)
        except RefusedError as error:
            raise ClusterStartupError(f"{name} ({address}): {error}. {received}") from None
        except ConnectionError:
            return False  # TensorFlow's own server.
        except TimeoutError as error:
            # Once: a worker that comes is asked again and again.
            warn_once(
                "%s cannot be reached on its control channel, %s, and can neither refuse another "
                "chief nor tell this one's failure from its end. Open that port. Received: %s",
                *(name, control_address(address), error),
            )
            return False
        except OSError as error:
            raise ClusterStartupError(
                f"{name} cannot be claimed at {control_address(address)}, the address of its "
                f"control channel: {error}. Received: {received}"
            ) from None
        if holder is not None:
            raise ClusterStartupError(
                f"{name} ({address}) serves another chief: {holder}. {self._own['who']} cannot use "
                "the same parameter servers and workers: end that job first, or give this one "
                f"other servers. Received: {received}"
            )
        return True


# Serves TensorFlow's runtime to the chief until the chief has ended.


# Shutdown messages of a chief to the tasks that serve it.
#
# From outside, a chief that is done looks like one that was killed: its address stops answering. So
# the chief greets its servers when it starts and sends a shutdown message at its end, by their
# control channels. A server that was greeted and received no shutdown message knows that its chief
# has died.

_HELLO, _SHUTDOWN = "hello", "shutdown"
_SHUTDOWN_SECONDS = 3.0


class ShutdownListener:
    """Receives, in a serving task, what its chief sends."""

    def __init__(self) -> None:
        self._received: set[str] = set()

    def receive(self, word: str) -> None:
        self._received.add(word)

    @property
    def has_chief_started(self) -> bool:
        """Whether a chief has sent anything."""
        return bool(self._received)

    @property
    def has_chief_left(self) -> bool:
        """Whether a chief has taken leave: it is about to end."""
        return _SHUTDOWN in self._received

    @property
    def is_chief_lost(self) -> bool:
        """Whether a chief that has ended since has greeted, but did not take leave."""
        return _HELLO in self._received and _SHUTDOWN not in self._received


class ShutdownNotifier:
    """Greets the servers, and takes leave of them when this process ends well.

    A script that ends by an exception does not end well.
    """

    def __init__(self, addresses: Mapping[str, str], but: Collection[str] = ()) -> None:
        self._addresses = dict(addresses)
        self._has_ended = threading.Event()
        self._has_failed = False
        self._here: set[str] = set()
        with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(self.greet, [name for name in addresses if name not in but]))
        # At the interpreter's end no thread can be started any more.
        self._shutdown_thread = threading.Thread(target=self._send_shutdown, daemon=True)
        self._shutdown_thread.start()
        atexit.register(self._at_exit)

    def greet(self, task: str) -> None:
        """Greets a server that is there, or was started again."""
        self._send(_HELLO, [task])

    def is_told_to_end(self, task: str) -> bool:
        """Whether a task can be reached and has got SIGTERM."""
        with contextlib.suppress(OSError, RefusedError):
            address = self._addresses[task]
            return bool(ask(address, "is_told_to_end", {}, _SHUTDOWN_SECONDS))
        return False

    def told_to_end(self, job: str) -> Iterator[str]:
        """Names of the tasks of a job that can be reached and have got SIGTERM."""
        # Another thread may greet one that was started again.
        here = [name for name in list(self._here) if name.startswith(f"{job}-")]
        yield from filter(self.is_told_to_end, here)

    def are_told_to_end(self, job: str) -> bool:
        """Whether a task of a job that can be reached has got SIGTERM."""
        return any(True for _ in self.told_to_end(job))

    def let_go(self, task: str) -> None:
        """Has a task end that is told to, and does without it."""
        with contextlib.suppress(OSError, RefusedError):
            ask(self._addresses[task], "let_go", {}, _SHUTDOWN_SECONDS)
        self._here.discard(task)

    def note_failure(self) -> None:
        """Notes that this process is about to end, but not well."""
        self._has_failed = True

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None and not self._has_failed:
            self._has_ended.set()
            # A server that hangs must not hold up the chief.
            self._shutdown_thread.join(_SHUTDOWN_SECONDS)

    def _send_shutdown(self) -> None:
        self._has_ended.wait()
        self._send(_SHUTDOWN, list(self._here))

    def _send(self, word: str, tasks: Iterable[str]) -> None:
        for task in tasks:
            try:
                ask(self._addresses[task], "word", {"word": word}, _SHUTDOWN_SECONDS)
                self._here.add(task)
            except (OSError, RefusedError):
                self._here.discard(task)  # It has died, or is TensorFlow's own, without `serve`.


_POLL = 0.5
_GREETING_TIMEOUT = 2.0
_CHIEF_GONE = 5.0  # seconds without a connection after which the chief has ended
# For a worker's answer to its chief, which asks its workers every second whether they have got
# SIGTERM. It gives one that has no more steps, and lets it go once it has done those that it has.
_DEPARTURE_SECONDS = 0.2
_RECONNECT = 30.0  # gRPC closes a connection that never speaks HTTP/2: ours is renewed before


def serve(
    config: TaskConfig,
    startup_timeout: float = 300.0,
    chief_gone: float = _CHIEF_GONE,
    log: Callable[[str], None] | None = None,
    may_leave: bool = False,
) -> tf.distribute.Server:
    """Starts this task's TensorFlow server and waits for the chief's end.

    The chief's end shows at its address: the connection kept to it closes and
    no new one is accepted for `chief_gone` seconds. A chief that uses
    `keras_psplus.ParameterServerStrategy` says whether it ends well; any
    other's end is taken for a good one.

    Args:
        config: The `TaskConfig` of a ps or worker task. Without a chief in
            the cluster, worker 0 takes its place.
        startup_timeout: Seconds to wait for the chief.
        chief_gone: Seconds for which the chief cannot be reached before it
            counts as ended.
        log: Function that takes a line of progress; writes to stderr by
            default.
        may_leave: Whether SIGTERM ends this process, and the chief goes on without it.
    """
    log = log or log_line
    leader, address = _leader(config)
    check_local_address(config)
    tuning.tune()
    if config.task_type == "ps":
        tuning.hide_gpus()
    listener = ShutdownListener()
    if may_leave:
        signals.SIGNAL.watch(mode="leave")

    def let_go() -> None:
        log("the chief does without this worker, which ends: it was told to (SIGTERM)")
        signals.SIGNAL.end_after(_DEPARTURE_SECONDS)

    # Before TensorFlow's server, by which a chief sees that this task is here.
    channel = listen_to_chief(
        config,
        {
            "claim": LeaseHolder(address).claim,
            "word": listener.receive,
            "is_told_to_end": lambda: signals.SIGNAL.is_noted,
            "let_go": let_go,
            "versions": own_versions,
        },
    )
    with contextlib.closing(channel):
        try:
            server = tf.distribute.Server(
                tf.train.ClusterSpec({job: list(tasks) for job, tasks in config.cluster.items()}),
                job_name=config.task_type,
                task_index=config.task_index,
                protocol="grpc",
                # A ps runs functions of all workers, a worker those of its own.
                config=tuning.server_config(
                    len(config.cluster.get("worker", ())) if config.task_type == "ps" else 1
                ),
            )
        except tf.errors.OpError as error:
            raise ClusterStartupError(
                f"TensorFlow's server of {config.name} cannot listen on {config.address}: "
                f"{error.message}. Received: TF_CONFIG={config.to_tf_config()}"
            ) from None
        log(f"{config.name} serves on {config.address}")
        report = task_report.current()
        if report is not None and leader == "chief-0":
            report.serves()
        outlive(
            config,
            lambda: listener.has_chief_started,
            lambda: listener.is_chief_lost,
            lambda: listener.has_chief_left,
            startup_timeout,
            chief_gone,
            log,
        )
    return server


def own_versions() -> dict[str, str]:
    """Versions that a task which serves must have in common with its chief."""
    return {"keras_psplus": versions.__version__, "TensorFlow": tf.__version__}


def outlive(
    config: TaskConfig,
    has_come: Callable[[], bool],
    is_lost: Callable[[], bool],
    has_left: Callable[[], bool],
    startup_timeout: float,
    chief_gone: float,
    log: Callable[[str], None] | None = None,
) -> None:
    """Waits until the chief has come and has ended."""
    log = log or log_line
    leader, address = _leader(config)
    if not _within(
        startup_timeout,
        lambda a: has_come() or handshake.tensorflow_responds(a, _GREETING_TIMEOUT),
        address,
    ):
        raise ClusterStartupError(
            f"{leader} did not come to {address} within {startup_timeout:g} s. Start it, or read "
            f"its log if it has ended. Received: TF_CONFIG={config.to_tf_config()}"
        )
    # A scheduler that tells all tasks to end leaves the chief time to save what this one has.
    signals.SIGNAL.watch()
    _outlive(address, lambda: 0.0 if has_left() else chief_gone)
    if is_lost():
        raise ChiefLostError(
            f"{leader} ({address}) has died or ended by an error. Look into its log, then start "
            f"the whole job again. {config.name} ends with it. "
            f"Received: no answer from {address} for {chief_gone:g} s"
        )
    log(f"{leader} has ended, {config.name} ends")


def wait_for_end_of_chief(config: TaskConfig) -> None:
    """Waits until the chief (worker 0, if there is none) has started and has ended.

    For a process beside the cluster, which receives no shutdown message.
    """
    address = config.cluster.get("chief", config.cluster.get("worker", ()))[0]
    while not handshake.tensorflow_responds(address, _GREETING_TIMEOUT):
        time.sleep(_POLL)
    _outlive(address, lambda: _CHIEF_GONE)


def _outlive(address: str, chief_gone: Callable[[], float]) -> None:
    # An accepted connection is enough: a chief that is merely slow has not ended.
    while _within(chief_gone(), handshake.listens, address):
        wait_for_close(address)
        time.sleep(_POLL)


def end_process_after(serving: Callable[[], None]) -> NoReturn:
    """Runs a function that serves until the chief has ended, and ends the process.

    Args:
        serving: Function without arguments. If it raises `ChiefLostError`, the exit code is 1, or
            143 after SIGTERM.
    """
    code = 0
    try:
        serving()
    except ChiefLostError as error:
        log_line(error)
        code = signals.EXIT_CODE if signals.SIGNAL.is_noted else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # TensorFlow's servers cannot be stopped in any other way.
    os._exit(code)


def _leader(config: TaskConfig) -> tuple[str, str]:
    leader = ("chief", 0) if "chief" in config.cluster else ("worker", 0)
    if config.address is None or (config.task_type, config.task_index) == leader:
        raise ClusterConfigError(
            f"{config.name} cannot serve: ps and worker tasks serve the chief. "
            f"Received: TF_CONFIG={config.to_tf_config()}"
        )
    job, index = leader
    return f"{job}-{index}", config.cluster[job][index]


def _within(seconds: float, condition: Callable[[str], bool], address: str) -> bool:
    deadline = time.monotonic() + seconds
    while not condition(address):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)
    return True


def wait_for_close(address: str) -> None:
    """Returns when a connection to the address breaks, or after a while."""
    try:
        with handshake.connect(address, _GREETING_TIMEOUT) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.settimeout(_RECONNECT)
            while connection.recv(4096):
                pass
    except OSError:
        pass


def log_line(line: str | Exception) -> None:
    print(f"keras_psplus: {line}", file=sys.stderr, flush=True)
