"""Handling of a lost worker.

TensorFlow notices a killed peer at once, and `heartbeat` a peer that hangs; the pending collectives
then fail with an error of TensorFlow's. Here the dead task's name is added to that error, and the
process exits without TensorFlow's shutdown barrier, which would wait for the dead task. A peer that
fails with an error has reported that before, see `error_report.py`.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import NoReturn

import tensorflow as tf

from keras_psplus.cluster import handshake
from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.handshake import ANSWERS, GONE, SILENT, places_of, state_of
from keras_psplus.cluster.monitor import task_report
from keras_psplus.cluster.process import signals
from keras_psplus.errors import PeerLostError
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

# Tells the other workers of a job why this one ends.
#
# Otherwise they learn of its end by a broken connection, or by heartbeats that do not come, and of
# its cause not at all.


ENDED = "keras_psplus ended: "
_REPORT_SECONDS = 2.0
# The process stays for so long after a report, so that it arrives before the connection breaks.
_ARRIVAL_SECONDS = 0.5
_LONGEST_CAUSE = 300
# Text of TensorFlow's errors before the cause.
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


def report_failure(
    task: TaskConfig, is_cause: Callable[[], bool], post: Callable[[str], None] | None = None
) -> None:
    """Reports this process's failure to the other workers.

    A failure is an uncaught exception or a non-zero exit code.

    Args:
        is_cause: Function that tells whether this process's failure is not another one's.
    """
    signals.watch()

    def report_error(kind: type[BaseException], error: BaseException) -> Callable[[], None] | None:
        # At a prompt, an exception does not end the process.
        if not is_cause() or hasattr(sys, "ps1") or sys.flags.interactive:
            return None
        message = _message(task, "by an error", _described(kind, error))
        # A coordination service that hangs must not keep the traceback back.
        thread = threading.Thread(target=report, args=[message, post], daemon=True)
        thread.start()
        return lambda: thread.join(_REPORT_SECONDS)

    signals.UNCAUGHT.reporters.append(report_error)
    atexit.register(_at_exit, task, is_cause, post)


def _at_exit(
    task: TaskConfig, is_cause: Callable[[], bool], post: Callable[[str], None] | None
) -> None:
    if not is_cause() or signals.SIGNAL.is_in_order:
        return
    if signals.is_bad() and _reported_at is None:
        report(_message(task, "early", f"exit code {signals.last()}"), post)
    if _reported_at is not None:
        time.sleep(max(0.0, _ARRIVAL_SECONDS - (time.monotonic() - _reported_at)))


def _message(task: TaskConfig, how: str, cause: str) -> str:
    return f"{ENDED}{task.name} ({task.address}) has ended {how}. Received: {cause}"


def _described(kind: type[BaseException], error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not _ABOUT_THE_GRAPH.match(line)]
    return ": ".join([kind.__name__, *lines[:1]])[:_LONGEST_CAUSE]


_SYMPTOMS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.InvalidArgumentError,
    tf.errors.UnknownError,
)
_CAUSE = re.compile(
    r"unavailable|reset by peer|refused|heartbeat|socket closed|aborted|deadline", re.IGNORECASE
)
# Lines that TensorFlow puts before what has happened.
_WHERE = re.compile(
    r"Graph execution error:|Detected at node|<stack traces unavailable>|  (File )?|"
    r"\d+ root error\(s\) found"
)
# Beginnings of our operations' own messages, wherever TensorFlow puts them.
LOST, REFUSED = "keras_psplus lost: ", "keras_psplus refused: "
_SAID = re.compile(f"({LOST}|{REFUSED})(.*)")
_ENDED = re.compile(rf"{ENDED}(\S+ \((\S+)\) has ended [^.]*)\. Received: (.*)")
_PROBE_SECONDS = 3.0
# Time that a failed process stays, so that the others can tell it from the dead one.
_LINGER_SECONDS = 2 * _PROBE_SECONDS
_POLL_SECONDS = 0.1
_MOST_THREADS = 64

_failed_at: float | None = None
_ended_address: str | None = None


@contextlib.contextmanager
def translate_errors(task: TaskConfig | None) -> Iterator[None]:
    """Adds the lost worker's name to TensorFlow's error.

    Raises:
        PeerLostError: In place of TensorFlow's error, if a peer does not answer.
        ValueError: If another worker has stopped the job for a reason of its own, such as
            unequal models.
    """
    try:
        yield
    except _SYMPTOMS as error:
        said = _SAID.search(str(error))
        if said:
            _mark_failed()
            kind = PeerLostError if said.group(1) == LOST else ValueError
            raise kind(said.group(2).rstrip("]")) from None
        if task is None or task.num_workers == 1:
            raise
        raise_if_ended(task, str(error))
        reason = re.search(r"Workers have fallen out of step.*", str(error))
        if reason:
            _mark_failed()
            raise ValueError(reason.group(0)) from None
        raise_if_peer_lost(task, error)
        if not _blames_a_peer(task, error):
            raise
        _raise_peer_lost(task, "Another worker", error)


def raise_if_peer_lost(task: TaskConfig, error: BaseException) -> None:
    """Raises PeerLostError, with their names, if other tasks do not answer.

    Args:
        error: TensorFlow's error that made somebody ask.
    """
    lost = _lost_peers(task)
    if lost:
        named = ", ".join(f"{name} ({address})" for name, address in lost)
        _raise_peer_lost(task, named, error)


def raise_if_peer_gone(task: TaskConfig, error: BaseException, silent: Collection[str]) -> None:
    """Raises PeerLostError, with their names, if other tasks have ended, or were silent for long.

    One that does not answer just now may go on.

    Args:
        silent: Names of those that have been silent for too long.
    """
    names = {task_name(job, index): address for job, index, address in task.peers()}
    lost = [(name, address) for name, address in names.items() if name in silent]
    lost = lost or [(name, address) for name, address, state in _states(task) if state == GONE]
    if lost:
        _raise_peer_lost(task, ", ".join(f"{name} ({address})" for name, address in lost), error)


def _raise_peer_lost(task: TaskConfig, who: str, error: BaseException) -> NoReturn:
    _mark_failed()
    raise PeerLostError(lost_message(who, task.name, _first_line(error))) from error


def lost_message(lost: str, who: str, cause: str) -> str:
    """Error message for lost workers."""
    return _without_it(f"{lost} stopped answering", who, cause)


def raise_if_ended(task: TaskConfig, text: str) -> None:
    """Raises PeerLostError if a text is another task's report of its failure.

    The error has the cause that the report names.
    """
    global _ended_address
    found = _ENDED.search(text)
    if not found:
        return
    who_has_ended, _ended_address, cause = found.groups()
    _mark_failed()
    cause = cause.split(" [type.googleapis.com")[0]
    raise PeerLostError(_without_it(who_has_ended, task.name, cause)) from None


def _without_it(what: str, who: str, received: str) -> str:
    return (
        f"{what}, and {who} cannot go on without it. Weights can still be "
        "read and saved in this process, but it cannot train any more. Look into that task's log, "
        "then restart every worker; with the BackupAndRestore callback training resumes where it "
        f"was. Received: {received}"
    )


def watch(task: TaskConfig, post: Callable[[str], None] | None = None) -> None:
    """Reports this worker's failure to the others, and exits if another worker fails.

    It ends past TensorFlow's shutdown barrier if a peer was lost.
    """
    report_failure(task, lambda: _failed_at is None, post)
    atexit.register(_leave, task)


def has_failed() -> bool:
    """Whether this process has lost another one, and ends with exit code 1."""
    return _failed_at is not None


def _mark_failed() -> None:
    global _failed_at
    if _failed_at is None:
        _failed_at = time.monotonic()


def _leave(task: TaskConfig) -> None:
    if _failed_at is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    report = task_report.current()
    if report is not None:
        report.failed()  # The launcher need not wait until this process ends.
    if _ended_address is None:
        time.sleep(max(0.0, _LINGER_SECONDS - (time.monotonic() - _failed_at)))
    else:
        _wait_for_end(_ended_address, _failed_at)
    logger.error("%s ends with exit code 1, because the job has failed", task.name)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _wait_for_end(address: str, failed_at: float) -> None:
    """Waits until a failed task has exited, so that a launcher sees that exit first."""
    deadline = failed_at + _LINGER_SECONDS
    while time.monotonic() < deadline:
        if not handshake.listens(address, _POLL_SECONDS):
            time.sleep(3 * _POLL_SECONDS)  # the end of its server is not quite that of the process
            return
        time.sleep(_POLL_SECONDS)


def _lost_peers(task: TaskConfig) -> list[tuple[str, str]]:
    """Tasks that do not answer, workers first, as `(name, address)`."""
    return [(name, address) for name, address, state in _states(task) if state != ANSWERS]


def _states(task: TaskConfig) -> list[tuple[str, str, str]]:
    """States of the other tasks, workers first, as `(name, address, state)`."""
    peers = task.peers()

    def ask(peer: tuple[str, int, str]) -> str:
        job, index, address = peer
        if job != "ps":
            try:
                context.context().check_collective_ops_peer_health(
                    f"/job:{job}/replica:0/task:{index}", timeout_in_ms=int(_PROBE_SECONDS * 1000)
                )
                return ANSWERS
            except tf.errors.DeadlineExceededError:
                return SILENT
            except tf.errors.OpError:
                pass
        # A task that has lost a server ends soon, and would be all that the others see.
        state = state_of(places_of(address), _PROBE_SECONDS)
        is_lost = job != "ps" and state == ANSWERS
        return GONE if is_lost else state

    with concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, len(peers))) as pool:
        states = list(pool.map(ask, peers))
    return [(task_name(job, i), address, state) for (job, i, address), state in zip(peers, states)]


def _blames_a_peer(task: TaskConfig, error: BaseException) -> bool:
    """Whether an error speaks of other tasks: any error may name this one."""
    named = re.findall(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)", str(error))
    own = {(task.task_type, str(task.task_index)), ("localhost", "0")}
    return bool(set(named) - own or re.search("heartbeat|coordination service", str(error)))


def _first_line(error: BaseException) -> str:
    """The line of TensorFlow's error that says what happened to the connection."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    # Where the operation was made comes first, if TensorFlow knows it.
    lines = [line.strip() for line in lines if not _WHERE.match(line)]
    telling = [line for line in lines if _CAUSE.search(line)]
    return ((telling or lines or [type(error).__name__])[0])[:300]


# Exit of a chief whose job has lost a task that holds variables.
#
# Nobody else runs the script there, so that there is no peer to tell and to wait for, as a worker
# has under all-reduce (`failure.py`).


_has_failed = False


def install_exit_hook() -> None:
    """Ends this process without TensorFlow's own end if a part of the cluster was lost."""
    atexit.register(_exit_if_failed)


def mark_failed() -> None:
    """Notes that a part of the cluster was lost."""
    global _has_failed
    _has_failed = True


def has_lost_tasks() -> bool:
    return _has_failed


def relevant_line(error: Exception) -> str:
    """The line of a TensorFlow error that says why a task could not be reached."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = [
        line for line in lines if re.search(r"refused|reset|closed|UNAVAILABLE|abort", line)
    ]
    return (relevant or lines)[0][:300]


def exit_now() -> NoReturn:
    """Ends this process with exit code 1, without TensorFlow's own end."""
    logger.error("the chief ends with exit code 1, because the job has failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _exit_if_failed() -> None:
    if _has_failed:
        # TensorFlow would talk to the lost tasks once more about all that it had there, and may
        # wait.
        exit_now()
