"""What the chief says when a parameter server or all workers are gone."""

import atexit
import contextlib
import os
import re
import socket
import sys
import time

import tensorflow as tf

from keras_psplus import tracebacks
from keras_psplus.cluster.config import split_address
from keras_psplus.log import logger

_CONNECT_SECONDS = 2.0
_has_failed = False


class ParameterServerLostError(RuntimeError):
    """A parameter server has died, and with it the variables that it held."""


@contextlib.contextmanager
def explained(strategy):
    """Names the parameter server when TensorFlow fails for want of one."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
        found = re.search(r"/job:ps/replica:0/task:(\d+)", str(error))
        if not found:
            raise
        index = int(found.group(1))
        addresses = strategy.cluster_resolver.cluster_spec().as_dict()["ps"]
        _mark_failed()
        raise ParameterServerLostError(
            f"ps-{index} ({addresses[index]}) stopped answering; the variables that it held are "
            "lost. Look into that task's log, then start the whole job again: with the "
            "BackupAndRestore callback training resumes where the last backup was made. "
            f"Received: {_telling_line(error)}"
        ) from error


def _telling_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"refused|reset|closed|UNAVAILABLE|abort", line)]
    return (telling or lines)[0][:300]


class WorkersLostError(RuntimeError):
    """No worker has been reachable for a while, so that no step can run."""


class WorkerWatch:
    """Gives the workers up after a while in which none of them could be reached.

    Args:
        addresses: Addresses of the workers, in order.
        timeout: Seconds to wait for one to come back.
    """

    def __init__(self, addresses, timeout):
        self._addresses, self._timeout = addresses, timeout
        self._gone_since = None

    def check(self):
        """Raises WorkersLostError once no worker has been reachable for the timeout."""
        if any(_reachable(address) for address in self._addresses):
            self._gone_since = None
            return
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        named = ", ".join(f"worker-{i} ({a})" for i, a in enumerate(self._addresses))
        if now - self._gone_since > self._timeout:
            _mark_failed()
            raise WorkersLostError(
                f"None of the workers has been reachable for {self._timeout:.0f} s: {named}. Look "
                "into their logs and start them again; a job whose chief still runs takes up its "
                f"work by itself then. Received: worker_timeout={self._timeout:g}"
            )
        logger.warning(
            "no worker can be reached: %s; giving up in %.0f s",
            named,
            self._timeout - (now - self._gone_since),
        )


def watch():
    """Ends this process without TensorFlow's own end if a part of the cluster was lost."""
    tracebacks.install()
    atexit.register(_leave)


def _mark_failed():
    global _has_failed
    _has_failed = True


def _leave():
    if not _has_failed:
        return
    # TensorFlow would talk to the lost tasks once more about all that it had there, and may wait.
    logger.error("the chief ends with exit code 1, because the job has failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _reachable(address):
    try:
        socket.create_connection(split_address(address), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
