"""Waits for the other tasks before TensorFlow does, which would wait without limit or word."""

import concurrent.futures
import sys
import time
from collections.abc import Callable, Collection

from keras_psplus.cluster import handshake
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig, split_address, task_name
from keras_psplus.cluster.listener import Listener
from keras_psplus.cluster.local_address import DNS_PATIENCE, bind_local_address, is_local

_LOG_EVERY = 10.0
_PAUSE = 0.3
_COURTESY = 2.0
_CLOSED_MEANS_UP = 3  # a proxy may accept and close; TensorFlow will find out


def wait_for_cluster(
    config: TaskConfig,
    job_types: Collection[str] = ("chief", "worker"),
    timeout: float = 300.0,
    log: Callable[[str], None] | None = None,
) -> None:
    """Waits until every other task of the given jobs can be reached.

    To be called before TensorFlow starts its gRPC server: this task's own
    address is bound and answered meanwhile, and is free again afterwards. A
    task counts as here once it accepts a connection, be it in its own
    `wait_for_cluster` or in TensorFlow's server.

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

    Raises:
        ClusterStartupError: If this task's address cannot be used, a peer has
            another cluster or the same task, or tasks are missing after
            `timeout` seconds (the message lists who is here and who is not).
    """
    if config.address is None:  # an evaluator runs beside the cluster
        return
    log = log or _log
    started = time.monotonic()
    mine = handshake.PeerIdentity.of(config)
    bound = bind_local_address(config, mine, min(timeout, DNS_PATIENCE), log)
    listener = Listener(bound, mine)
    try:
        _Roll(config, mine, listener, job_types).call(started, timeout, log)
    finally:
        listener.close()


def check_local_address(config: TaskConfig, log: Callable[[str], None] | None = None) -> None:
    """Checks that this task's own address can be bound.

    Args:
        config: This process's `TaskConfig`.
        log: As for `wait_for_cluster`.

    Raises:
        ClusterStartupError: If another process holds the port, or the address
            is not this machine's.
    """
    bind_local_address(config, handshake.PeerIdentity.of(config), 0.0, log or _log).close()


def probe_peers(config: TaskConfig, timeout: float = 3.0) -> dict[str, str | None]:
    """Tries to connect to every other task once.

    Args:
        config: A `TaskConfig`.
        timeout: Seconds that one connection may take.

    Returns:
        Dict from task name to `None` (reachable) or the reason why not.
    """

    def probe(address):
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


class _Roll:
    """The roll call: who answered, and why the others did not."""

    def __init__(self, config, mine, listener, job_types):
        self._config, self._mine, self._listener = config, mine, listener
        self._missing = {
            task_name(job, index): address for job, index, address in config.peers(job_types)
        }
        self._reasons = dict.fromkeys(self._missing, "not tried yet")
        self._closed = dict.fromkeys(self._missing, 0)
        self._here = []
        self._also_waiting = set()  # those that answered from their own `wait_for_cluster`

    def call(self, started, timeout, log):
        next_log = started + _LOG_EVERY
        while True:
            left = started + timeout - time.monotonic()
            self._dial_missing(min(2.0, max(left, 0.1)))
            if not self._missing:
                return self._let_others_see_me()
            now = time.monotonic()
            if now - started >= timeout:
                raise self._too_late(timeout)
            if now >= next_log:
                next_log += _LOG_EVERY
                log(self._progress(now - started, timeout))
            self._pause(_PAUSE)

    def _let_others_see_me(self):
        """Stays until those that wait have called too; they do at once, my call woke them.

        Only a courtesy: whoever comes too late finds TensorFlow's server here a moment later.
        """
        deadline = time.monotonic() + _COURTESY
        while self._also_waiting - self._listener.callers and time.monotonic() < deadline:
            self._pause(0.05)
        self._raise_problem(self._listener.problem)

    def _pause(self, seconds):
        if self._listener.changed.wait(seconds):
            self._listener.changed.clear()
        self._raise_problem(self._listener.problem)

    def _dial_missing(self, connect_timeout):
        names = list(self._missing)
        own = self._own_if_elsewhere()
        targets = [(name, self._missing[name]) for name in names] + own
        if not targets:
            return
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(16, len(targets))) as pool:
            calls = {
                name: pool.submit(handshake.dial, address, self._mine, connect_timeout)
                for name, address in targets
            }
        for name, call in calls.items():
            self._note(name, call)
        self._raise_problem(self._listener.problem)

    def _note(self, name, call):
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
            if name in self._missing:
                self._reasons[name] = str(error)
            return
        if theirs is not None:
            self._raise_problem(handshake.conflict(self._mine, theirs, expected=name))
            self._also_waiting.add(name)
        if self._missing.pop(name, None) is not None:
            self._here.append(name)

    def _own_if_elsewhere(self):
        """My own address, if its name leads to another host: someone else may answer there."""
        host, _ = split_address(self._config.address)
        return [] if is_local(host) else [(self._config.name, self._config.address)]

    def _raise_problem(self, problem):
        if problem:
            raise ClusterStartupError(
                f"The cluster cannot start: {problem}. "
                f"Received: TF_CONFIG={self._config.to_tf_config()}"
            )

    def _progress(self, seconds, timeout):
        missing = ", ".join(f"{name} ({address})" for name, address in self._missing.items())
        here = ", ".join([self._config.name, *self._here])
        return f"waiting for {missing}; here: {here}; {seconds:.0f} s of {timeout:.0f} s"

    def _too_late(self, timeout):
        here = ", ".join([f"{self._config.name} (this task, {self._config.address})", *self._here])
        missing = "\n".join(
            f"  {name} at {address}: {self._reasons[name]}"
            for name, address in self._missing.items()
        )
        total = 1 + len(self._here) + len(self._missing)
        return ClusterStartupError(
            f"{len(self._missing)} of {total} tasks did not come within {timeout:.0f} s.\n"
            f"Here: {here}.\nMissing:\n{missing}\n"
            "Start the missing tasks, read their logs if they have ended, and check that this "
            f"host can reach their addresses. Received: timeout={timeout:g}, "
            f"TF_CONFIG={self._config.to_tf_config()}"
        )


def _log(line):
    print(f"keras_psplus: {line}", file=sys.stderr, flush=True)
