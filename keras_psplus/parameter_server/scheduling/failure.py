"""Errors of the chief about a lost parameter server, or about losing all workers."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from keras_psplus.cluster.wire import handshake
from keras_psplus.core.jobs import job_failure
from keras_psplus.errors import ParameterServerLostError, WorkersLostError
from keras_psplus.log import logger


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
        job_failure.mark_failed()
        raise ParameterServerLostError(
            f"ps-{index} ({addresses[index]}) stopped answering; the variables that it held are "
            "lost. Look into that task's log, then start the whole job again: with the "
            "BackupAndRestore callback training resumes where the last backup was made. "
            f"Received: {job_failure.relevant_line(error)}"
        ) from error


class WorkerWatch:
    """Gives the workers up after a while in which none of them could be reached.

    A host that accepts a connection is enough, where `stalls.unresponsive_tasks` wants an answer:
    a worker that is only stopped may go on, and a stall warning names it.

    Args:
        timeout: Seconds to wait for one to come back.
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
            job_failure.mark_failed()
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
