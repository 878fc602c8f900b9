"""Tells the other workers of a job why this one ends.

Otherwise they learn of its end by a broken connection, or by heartbeats that do not come, and of
its cause not at all.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_psplus import tracebacks
from keras_psplus.cluster.process import exit_code, termination
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.cluster.config import TaskConfig

ENDED = "keras_psplus ended: "
_REPORT_SECONDS = 2.0
# The process stays for so long after a report, so that it arrives before the connection breaks.
_ARRIVAL_SECONDS = 0.5
_LONGEST_CAUSE = 300
# What TensorFlow's errors say before the cause.
_ABOUT_THE_GRAPH = re.compile(r'Graph execution error:|Detected at |File "|\[\[')

_reported_at: float | None = None


def report(message: str, post: Callable[[str], None] | None = None) -> None:
    """Has the collectives of all other workers fail with a message.

    Args:
        message: Text of one line.
        post: Function of the message that reaches workers which wait for this one elsewhere than in
            a collective; None for none.
    """
    global _reported_at
    if _reported_at is not None:
        return
    _reported_at = time.monotonic()
    try:
        if post is not None:
            post(message)
        context.context().report_error_to_cluster(tf.errors.INVALID_ARGUMENT, message)
    except (tf.errors.OpError, ValueError) as error:
        logger.warning("could not tell the other workers: %s", error)


def watch(
    task: TaskConfig, is_cause: Callable[[], bool], post: Callable[[str], None] | None = None
) -> None:
    """Reports this process's failure to the other workers.

    A failure is an uncaught exception or a non-zero exit code.

    Args:
        is_cause: Function that tells whether this process's failure is not another one's.
        post: As for `report`.
    """
    exit_code.watch()

    def report_error(kind: type[BaseException], error: BaseException) -> Callable[[], None] | None:
        # At a prompt, an exception does not end the process.
        if not is_cause() or hasattr(sys, "ps1") or sys.flags.interactive:
            return None
        message = _message(task, "by an error", _described(kind, error))
        # A coordination service that hangs must not keep the traceback back.
        thread = threading.Thread(target=report, args=[message, post], daemon=True)
        thread.start()
        return lambda: thread.join(_REPORT_SECONDS)

    tracebacks.UNCAUGHT.reporters.append(report_error)
    atexit.register(_at_exit, task, is_cause, post)


def _at_exit(
    task: TaskConfig, is_cause: Callable[[], bool], post: Callable[[str], None] | None
) -> None:
    if not is_cause() or termination.SIGNAL.is_in_order:
        return
    if exit_code.is_bad() and _reported_at is None:
        report(_message(task, "early", f"exit code {exit_code.last()}"), post)
    if _reported_at is not None:
        time.sleep(max(0.0, _ARRIVAL_SECONDS - (time.monotonic() - _reported_at)))


def _message(task: TaskConfig, how: str, cause: str) -> str:
    return f"{ENDED}{task.name} ({task.address}) has ended {how}. Received: {cause}"


def _described(kind: type[BaseException], error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not _ABOUT_THE_GRAPH.match(line)]
    return ": ".join([kind.__name__, *lines[:1]])[:_LONGEST_CAUSE]
