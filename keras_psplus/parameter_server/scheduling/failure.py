"""Errors of the chief about a lost parameter server, or about losing all workers."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from keras_psplus.cluster.config import split_address
from keras_psplus.core.jobs import job_failure
from keras_psplus.errors import ParameterServerLostError, WorkersLostError
from keras_psplus.log import logger

_CONNECT_SECONDS = 2.0


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
    """Gives the workers up if none of them could be reached for some seconds."""

    def __init__(self, addresses: Sequence[str], timeout: float) -> None:
        self._addresses, self._timeout = addresses, timeout
        self._gone_since: float | None = None

    def check_workers(self) -> None:
        """Raises WorkersLostError once no worker has been reachable for the timeout."""
        if any(_reachable(address) for address in self._addresses):
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


def _reachable(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
