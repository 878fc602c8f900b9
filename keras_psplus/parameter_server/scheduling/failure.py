"""Lost and silent tasks, as the chief sees them: waits and errors."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.cluster import handshake
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.stalls import PendingWait
from keras_psplus.core.jobs import failure
from keras_psplus.errors import ParameterServerLostError, WorkersLostError
from keras_psplus.log import logger

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.parameter_server.scheduling.queue import ClosureQueue


# Errors of the chief about a lost parameter server, or about losing all workers.


@contextlib.contextmanager
def translate_errors(server_addresses: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Adds the lost server's name, and its address, to TensorFlow's error."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        found = re.search(r"/job:ps/replica:0/task:(\d+)", str(error))
        if not found:
            raise
        index = int(found.group(1))
        addresses = server_addresses()
        failure.mark_failed()
        raise ParameterServerLostError(
            f"ps-{index} ({addresses[index]}) stopped answering; the variables that it held are "
            "lost. Look into that task's log, then start the whole job again: with the "
            "BackupAndRestore callback training resumes where the last backup was made. "
            f"Received: {failure.relevant_line(error)}"
        ) from error


class WorkerWatch:
    """Gives the workers up after a while in which none of them could be reached.

    A host that accepts a connection is enough, where `stalls.unresponsive_tasks` wants an answer:
    a worker that is only stopped may go on, and a stall warning names it.
    """

    def __init__(self, addresses: Sequence[str], timeout: float) -> None:
        self._addresses, self._timeout = addresses, timeout
        self._gone_since: float | None = None

    def check_workers(self) -> None:
        """Raises WorkersLostError once no worker has been reachable for the timeout."""
        if any(map(handshake.listens, self._addresses)):
            self._gone_since = None
            return
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        named = ", ".join(f"worker-{i} ({a})" for i, a in enumerate(self._addresses))
        if now - self._gone_since > self._timeout:
            failure.mark_failed()
            raise WorkersLostError(
                f"None of the workers has been reachable for {self._timeout:.0f} s: {named}. Look "
                "into their logs and start them again; a job whose chief still runs takes up its "
                f"work by itself then. Received: heartbeat_timeout={self._timeout:g}"
            )
        logger.warning(
            "no worker can be reached: %s; giving up in %.0f s",
            named,
            self._timeout - (now - self._gone_since),
        )


# Detection of closures that do not return, and of other answers that are overdue.
#
# Other strategies' probes know one wait at a time, the present step; a chief has a closure under
# way on each worker.


class StallProbe(stalls.StallProbe):
    """Probe of `stalls.Inspector` on the chief."""

    def __init__(
        self, queue: ClosureQueue, progress: Progress, spec: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__("chief-0", progress)
        self._queue = queue
        self._workers, self._servers = (
            {f"{job}-{i}": address for i, address in enumerate(spec[job])}
            for job in ("worker", "ps")
        )

    def look(self) -> dict[Any, PendingWait]:
        # Of several closures that a worker has under way, the first one.
        oldest: dict[int | None, Any] = {}
        for closure in self._queue.closures:
            first = oldest.get(closure.tried_on)
            if closure.started and (first is None or closure.started < first.started):
                oldest[closure.tried_on] = closure
        waits: dict[Any, PendingWait] = {
            (id(closure), closure.started): PendingWait(
                f"chief-0 at {closure.about}",
                functools.partial(self._of_closure, f"worker-{closure.tried_on}"),
                closure.started,
            )
            for closure in oldest.values()
        }
        # Its own calls wait for answers, too, also for those to what it has sent before.
        return waits or dict(super().look())

    def _of_closure(self, worker: str) -> str:
        asked = {worker: self._workers[worker], **self._servers}
        silent = stalls.unresponsive_tasks(asked)
        slow = {} if silent else stalls.slow_tasks(asked)
        if worker in silent:
            missing = f"{worker} (no answer; end its process, and another takes the closure)"
        elif silent:
            missing = f"{worker}, which is held up by {', '.join(silent)} (no answer)"
        elif slow:
            listed = ", ".join(
                f"{name} (answers after {took:.1f} s)" for name, took in slow.items()
            )
            missing = f"{worker}; slow: {listed}"
        else:
            missing = f"{worker}, which answers: it is slow, or has no data"
        return f"the closure; not arrived: {missing}"

    def describe(self, entered: int) -> str:
        lost = {f"worker-{index}" for index in self._queue.lost}
        there = {name: a for name, a in self._workers.items() if name not in lost}
        silent = stalls.unresponsive_tasks({**there, **self._servers})
        missing = ", ".join(f"{name} (no answer)" for name in silent)
        return f"an answer; not arrived: {missing or 'none; it may still trace, or wait for data'}"
