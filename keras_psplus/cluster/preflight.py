"""Checks before TensorFlow joins a cluster: this task's address, and which others answer."""

import concurrent.futures
import dataclasses
import errno
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, TypeVar

from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel import JobSecret
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig, split_address, task_name
from keras_psplus.cluster.handshake import Listener, PeerIdentity, conflict
from keras_psplus.cluster.ports import port_holder

# Checks of this task's address: it is on this machine, and its port is free.

DNS_PATIENCE = 20.0  # seconds; a Kubernetes pod's own name may resolve only after a while


def listen_on_own_address(
    config: TaskConfig, mine: PeerIdentity, patience: float, log: Callable[[str], None]
) -> Listener:
    """Answers handshakes on the task's own port, on all interfaces as TensorFlow does."""
    check_own_address(config, mine, patience, log)
    assert config.address is not None
    _, port = split_address(config.address)
    try:
        return Listener(port, mine, JobSecret.of(config))
    except OSError:
        taken = OSError(errno.EADDRINUSE, "")  # since it has been checked
        raise _cannot_bind(config, mine, port, taken) from None


def check_own_address(
    config: TaskConfig, mine: PeerIdentity, patience: float, log: Callable[[str], None]
) -> None:
    """Checks that the task's own port can be listened on, as `listen_on_own_address` does it."""
    assert config.address is not None
    host, port = split_address(config.address)
    family = _resolve_own(config, host, patience)
    if not is_local(host):
        if _is_literal(host):
            raise ClusterStartupError(
                f"The address of {config.name}, {config.address}, is not on this machine "
                f"({socket.gethostname()}). Start {config.name} on the machine with that address, "
                f"or correct TF_CONFIG. Received: TF_CONFIG={config.to_tf_config()}"
            )
        log(
            f"the name {host!r} of {config.name} leads to another address than this machine's "
            "(fine behind a Kubernetes service, otherwise this task runs on the wrong host)"
        )
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            raise _cannot_bind(config, mine, port, error) from None


def _cannot_bind(
    config: TaskConfig, mine: PeerIdentity, port: int, error: OSError
) -> ClusterStartupError:
    received = f"Received: TF_CONFIG={config.to_tf_config()}"
    if error.errno != errno.EADDRINUSE:
        return ClusterStartupError(
            f"{config.name} cannot listen on {config.address}: {error.strerror}. Choose another "
            f"port (above 1023). {received}"
        )
    holder = port_holder(port) or "another process"
    try:
        theirs = handshake.dial(f"127.0.0.1:{port}", mine, JobSecret.of(config))
    except OSError:
        theirs = None
    if theirs is not None:
        holder = f"{theirs.who}, a task that was started already,"
    advice = (
        "It may be a second process with the same task, or one left over from an earlier run: end "
        "it, or choose another port."
    )
    if holder.startswith(f"process {os.getpid()} "):
        advice = (
            "That is this process: the server of a strategy stays while it runs. Make one strategy "
            "for each process, and all models under it."
        )
    return ClusterStartupError(
        f"{config.name} cannot listen on {config.address}: {holder} uses the port. {advice} "
        f"{received}"
    )


def _resolve_own(config: TaskConfig, host: str, patience: float) -> socket.AddressFamily:
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ClusterStartupError(
                    f"The host name {host!r} in the address of {config.name} does not resolve "
                    f"({error}). Use a name that every task can resolve, or an IP address. "
                    f"Received: TF_CONFIG={config.to_tf_config()}"
                ) from None
        time.sleep(min(1.0, max(deadline - time.monotonic(), 0.0)))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether one of the host's addresses is this machine's: only those can be bound."""
    try:
        resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(address)
                return True
            except OSError:
                continue
    return False


# The roll call at start: which tasks answered, and why the others did not.


# Peers that a task contacts in a large cluster, instead of all others.

_Task = TypeVar("_Task")

# Up to so many tasks, every one asks every other: it costs little, and each can name all.
EVERYBODY = 32


def is_large(count: int) -> bool:
    """Whether a cluster is so large that each task contacts its neighbours only."""
    return count > EVERYBODY


def neighbours(tasks: Sequence[_Task], own: int) -> list[_Task]:
    """The tasks that one of them asks.

    In a large cluster, these are the ones that follow it at distances of 1, 2, 4 and so on, and the
    one before it, as in a ring: each task is asked by as many as it asks, and what one of them has
    found can be with all in as many rounds.

    Example:

    ```python
    neighbours(range(64), 0)  # [1, 2, 4, 8, 16, 32, 63]
    ```

    Reference: Stoica et al., "Chord: A Scalable Peer-to-peer Lookup Service for Internet
    Applications", SIGCOMM 2001 (fingers at powers of two).
    """
    count = len(tasks)
    if not is_large(count):
        return [task for rank, task in enumerate(tasks) if rank != own]
    distances = [-1] + [1 << power for power in range((count - 1).bit_length())]
    ranks = {(own + distance) % count for distance in distances} - {own}
    return [tasks[rank] for rank in sorted(ranks)]


_LOG_EVERY = 10.0
_NOT_TRIED = "not tried yet"
_PAUSE = 0.3
_ROUND = 3.0  # the first task of a large cluster calls those that have not called it so often
_COURTESY, _TRIES = 2.0, 2
_CLOSED_MEANS_UP = 3  # a proxy may accept and close; TensorFlow will find out

# A call of another task, and what it has said of itself.
_Call: TypeAlias = concurrent.futures.Future[PeerIdentity | None]


class PeerDiscovery:
    """Calls every other task until all have answered."""

    def __init__(
        self,
        config: TaskConfig,
        mine: PeerIdentity,
        job: JobSecret,
        listener: Listener,
        job_types: Collection[str],
    ) -> None:
        self._config, self._mine, self._job, self._listener = config, mine, job, listener
        self._addresses = {
            task_name(job, index): address for job, index, address in config.peers(job_types)
        }
        self._missing = dict(self._addresses)
        self._reasons = dict.fromkeys(self._missing, _NOT_TRIED)
        # Names of tasks that this one cannot talk to by TLS.
        self._without_tls: set[str] = set()
        self._closed = dict.fromkeys(self._missing, 0)
        self._here: list[str] = []
        # Those that answered from their own `wait_for_cluster`.
        self._also_waiting: set[str] = set()
        self._spare_workers = 0

    @property
    def missing(self) -> set[str]:
        return set(self._missing)

    def call(
        self, started: float, timeout: float, log: Callable[[str], None], spare_workers: int = 0
    ) -> None:
        """Returns when all have answered."""
        next_log, self._spare_workers = started + _LOG_EVERY, spare_workers
        while True:
            left = started + timeout - time.monotonic()
            self._dial_missing(min(2.0, max(left, 0.1)))
            if self._is_complete():
                return self._let_others_see_me()
            now = time.monotonic()
            if now - started >= timeout:
                raise self._too_late(timeout)
            if now >= next_log:
                next_log += _LOG_EVERY
                log(self._progress(now - started, timeout))
            self._pause(_PAUSE)

    def _to_dial(self) -> list[str]:
        return list(self._missing)

    def _is_complete(self) -> bool:
        workers = [name for name in self._missing if name.startswith("worker-")]
        return len(self._missing) == len(workers) <= self._spare_workers

    def _awaited(self) -> set[str]:
        return self._also_waiting

    def _let_others_see_me(self) -> None:
        """Waits until the waiting tasks have called too, which my call makes them do.

        This is a courtesy: a task that starts too late finds TensorFlow's server here a moment
        later.
        """
        deadline = time.monotonic() + _COURTESY
        while self._awaited() - self._listener.callers and time.monotonic() < deadline:
            self._pause(0.05)
        self._raise_problem(self._listener.problem)

    def _let_the_other_ask(self) -> None:
        """Waits until a task of another cluster, woken by this one, can have called."""
        deadline = time.monotonic() + _COURTESY
        while not self._listener.strangers and time.monotonic() < deadline:
            time.sleep(0.05)

    def _pause(self, seconds: float) -> None:
        if self._listener.changed.wait(seconds):
            self._listener.changed.clear()
        self._raise_problem(self._listener.problem)

    def _dial_missing(self, connect_timeout: float) -> None:
        own = self._own_if_elsewhere()
        targets = [(name, self._missing[name]) for name in self._to_dial()] + own
        if not targets:
            return
        for name, call in self._dial(targets, self._mine, connect_timeout).items():
            self._note(name, call)
        self._raise_problem(self._listener.problem)

    def _dial(
        self, targets: Sequence[tuple[str, str]], mine: PeerIdentity, connect_timeout: float
    ) -> dict[str, _Call]:
        """Futures of calls that are done, by the names of those that were called."""
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(16, len(targets))) as pool:
            return {
                name: pool.submit(handshake.dial, address, mine, self._job, connect_timeout)
                for name, address in targets
            }

    def _note(self, name: str, call: _Call) -> None:
        try:
            theirs = call.result()
        except ConnectionResetError as error:
            if name not in self._missing:
                return
            self._closed[name] += 1
            if self._closed[name] < _CLOSED_MEANS_UP:
                self._reasons[name] = str(error) or "it closed the connection"
                return
            theirs = None
        except OSError as error:
            # A task that has said why it ends is not merely gone.
            is_known = isinstance(error, ConnectionRefusedError) and name in self._without_tls
            if name in self._missing and not is_known:
                self._reasons[name] = str(error)
            if isinstance(error, handshake.TlsError):
                self._without_tls.add(name)
            return
        if theirs is not None:
            problem = conflict(self._mine, theirs, expected=name)
            if problem and not theirs.is_proven:
                self._let_the_other_ask()
            self._raise_problem(problem)
            self._also_waiting.add(name)
        if self._missing.pop(name, None) is not None:
            self._here.append(name)

    def _own_if_elsewhere(self) -> list[tuple[str, str]]:
        """My own address, if its name leads to another host: someone else may answer there."""
        assert self._config.address is not None
        host, _ = split_address(self._config.address)
        return [] if is_local(host) else [(self._config.name, self._config.address)]

    def _raise_problem(self, problem: str | None) -> None:
        if problem:
            raise ClusterStartupError(
                f"The cluster cannot start: {problem}. "
                f"Received: TF_CONFIG={self._config.to_tf_config()}"
            )

    def _progress(self, seconds: float, timeout: float) -> str:
        missing = ", ".join(
            f"{name} ({address}{self._remark_on(name)})" for name, address in self._missing.items()
        )
        here = ", ".join([self._config.name, *self._here])
        return f"waiting for {missing}; here: {here}; {seconds:.0f} s of {timeout:.0f} s"

    def _remark_on(self, name: str) -> str:
        """Clause of a message on a missing task, unless it is merely not started."""
        reason = self._reason(name)
        return "" if reason in (_NOT_TRIED, handshake.REFUSED) else f": {reason}"

    def _reason(self, name: str) -> str:
        called = name in self._listener.callers
        return self._reasons[name] + (", though it has called this task" if called else "")

    def _too_late(self, timeout: float) -> ClusterStartupError:
        here = ", ".join([f"{self._config.name} (this task, {self._config.address})", *self._here])
        missing = "\n".join(
            f"  {name} at {address}: {self._reason(name)}"
            for name, address in self._missing.items()
        )
        total = 1 + len(self._here) + len(self._missing)
        return ClusterStartupError(
            f"{len(self._missing)} of {total} tasks did not come within {timeout:.0f} s.\n"
            f"Here: {here}.\nMissing{self._listener.note_of_strangers()}:\n{missing}\n"
            "Start the missing tasks, read their logs if they have ended, and check that this "
            f"host can reach their addresses. Received: timeout={timeout:g}, "
            f"TF_CONFIG={self._config.to_tf_config()}"
        )


class SparsePeerDiscovery(PeerDiscovery):
    """Roll call of a large cluster: the first task calls all, the others a few.

    The first task's second call says that it has found all. A task that starts late, when the first
    one has TensorFlow's server already, needs no such call.
    """

    def __init__(
        self,
        config: TaskConfig,
        mine: PeerIdentity,
        job: JobSecret,
        listener: Listener,
        job_types: Collection[str],
    ) -> None:
        super().__init__(config, mine, job, listener, job_types)
        self._names = [task_name(job, i) for job, i, _ in config.tasks() if job in job_types]
        self._leader, self._leads = self._names[0], config.name == self._names[0]
        self._next_round, self._leader_has_answered = time.monotonic(), False
        if not self._leads:
            called = {self._leader, *self._neighbours_of(config.name)}
            self._missing = {name: a for name, a in self._missing.items() if name in called}

    def _neighbours_of(self, name: str) -> list[str]:
        return neighbours(self._names, self._names.index(name))

    def _to_dial(self) -> list[str]:
        now = time.monotonic()
        if not self._leads:
            if not self._missing and now >= self._next_round:
                # It may have died since, or its second call may not have come through.
                self._missing[self._leader] = self._addresses[self._leader]
                self._here.remove(self._leader)
                self._leader_has_answered = True
                self._also_waiting.discard(self._leader)
            if self._leader in self._missing:
                self._next_round = now + _LOG_EVERY
            return list(self._missing)
        if now < self._next_round:
            return [name for name in self._missing if name in self._listener.callers]
        # Those that have called before, and have their servers now, do not call again.
        self._next_round = now + _ROUND
        return list(self._missing)

    def _is_complete(self) -> bool:
        if self._missing:
            return False
        if not self._leads:
            return self._listener.heard_all_here or self._leader not in self._also_waiting
        # This task may have found itself, at an address of another host.
        waiting = self._also_waiting - {self._leader}
        others = [(name, self._addresses[name]) for name in waiting]
        for _ in range(_TRIES if others else 0):
            calls = self._dial(others, dataclasses.replace(self._mine, all_here=True), _COURTESY)
            others = [other for other in others if calls[other[0]].exception() is not None]
            if not others:
                break
        return True

    def _awaited(self) -> set[str]:
        if self._leads or self._leader not in self._also_waiting:
            return self._also_waiting
        return {
            name for name in self._names[1:] if self._config.name in self._neighbours_of(name)
        } | {self._leader}

    def _lacks_others(self) -> bool:
        """Whether called tasks are missing, beyond a first task that has answered and left."""
        known = {self._leader} if self._leader_has_answered else set()
        return bool(self._missing.keys() - known)

    def _progress(self, seconds: float, timeout: float) -> str:
        if self._lacks_others():
            return super()._progress(seconds, timeout)
        return (
            f"waiting for {self._leader} ({self._addresses[self._leader]}) to find all "
            f"{len(self._names)} tasks; it says which are missing; "
            f"{seconds:.0f} s of {timeout:.0f} s"
        )

    def _too_late(self, timeout: float) -> ClusterStartupError:
        if self._lacks_others():
            return super()._too_late(timeout)
        return ClusterStartupError(
            f"{self._leader} ({self._addresses[self._leader]}) did not find all "
            f"{len(self._names)} tasks within {timeout:.0f} s. Its own error says which are "
            f"missing. Received: timeout={timeout:g} on {self._config.name}"
        )


# Waits for the other tasks before TensorFlow does, which would wait without limit or word.


def wait_for_cluster(
    config: TaskConfig,
    job_types: Collection[str] = ("chief", "worker"),
    timeout: float = 300.0,
    log: Callable[[str], None] | None = None,
    all_wait: bool = False,
    spare_workers: int = 0,
) -> set[str]:
    """Waits until every other task of the given jobs can be reached.

    To be called before TensorFlow starts its gRPC server: this task's own
    address is bound and answered meanwhile, and is free again afterwards. A
    task counts as here once it accepts a connection, be it in its own
    `wait_for_cluster` or in TensorFlow's server.

    In a large cluster whose tasks all wait for each other (`all_wait`), the
    first one calls all others, and tells them once it has found them; each of
    those calls the first one and some neighbours.

    Example:

    ```python
    config = read_task_config()
    wait_for_cluster(config, timeout=60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    ```

    Args:
        config: This process's `TaskConfig`.
        job_types: The jobs whose tasks to wait for.
        timeout: Seconds to wait.
        log: Function that takes a line of progress; writes to stderr by
            default.
        all_wait: Whether all tasks of `job_types` call this function.
        spare_workers: How many workers may be missing, if not `all_wait`.

    Returns:
        Names of the workers that are missing.

    Raises:
        ClusterStartupError: If this task's address cannot be used, a peer has
            another cluster or the same task, or tasks are missing after
            `timeout` seconds (the message lists who is here and who is not).
    """
    if config.address is None:  # an evaluator runs beside the cluster
        return set()
    log = log or _log
    started = time.monotonic()
    mine, job = PeerIdentity.of(config), JobSecret.of(config)
    listener = listen_on_own_address(config, mine, min(timeout, DNS_PATIENCE), log)
    tasks = [task for task in config.tasks() if task[0] in job_types]
    kind = SparsePeerDiscovery if all_wait and is_large(len(tasks)) else PeerDiscovery
    discovery = kind(config, mine, job, listener, job_types)
    try:
        discovery.call(started, timeout, log, spare_workers)
    finally:
        listener.close()
    return discovery.missing


def check_local_address(config: TaskConfig, log: Callable[[str], None] | None = None) -> None:
    """Checks that this task's own address can be bound."""
    check_own_address(config, PeerIdentity.of(config), 0.0, log or _log)


def probe_peers(config: TaskConfig, timeout: float = 3.0) -> dict[str, str | None]:
    """Tries to connect to every other task once."""

    def probe(address: str) -> str | None:
        try:
            handshake.connect(address, timeout).close()
        except OSError as error:
            return str(error)
        return None

    peers = config.peers()
    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
        reasons = list(pool.map(probe, [address for _, _, address in peers]))
    return {
        task_name(job, index): reason
        for (job, index, _), reason in zip(peers, reasons, strict=True)
    }


def _log(line: str) -> None:
    print(f"keras_psplus: {line}", file=sys.stderr, flush=True)
