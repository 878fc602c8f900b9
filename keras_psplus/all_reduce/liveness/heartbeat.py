"""Counts a worker as dead that has not answered for `heartbeat_timeout`.

TensorFlow's coordination service sends heartbeats at half of its timeout, so that a worker that
stops counts as dead after anything between half of it and the whole; the first worker, which has
the service, after what is left of a call. Here the workers ask each other as often as the figure
needs, and TensorFlow's service is given `service_seconds`, with which it is always later. Workers
have no port but TensorFlow's while they train, and so no control channel with a keepalive; and
while steps go on, nothing is sent.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_psplus.all_reduce.liveness.stalls import RUNNING, StepMarks
from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.handshake import is_silent, places_of
from keras_psplus.cluster.preflight import is_large, neighbours
from keras_psplus.core.jobs import failure
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.core.jobs.control import ControlPlane


_LONGEST_ANSWER_SECONDS, _MOST_THREADS = 1.0, 64


def service_seconds(timeout: float) -> float:
    """Heartbeat timeout of TensorFlow's service for a job's `timeout`.

    A stop of `timeout` at any moment is shorter than it.
    """
    return 3 * timeout


class Silence:
    """Since when others have been silent.

    Args:
        timeout: Seconds after which one that is silent counts as dead.
        answer: Seconds that each has for an answer.
    """

    def __init__(self, timeout: float, answer: float) -> None:
        # What was asked just before the stop may have its answer late.
        self._limit, self._longest_gap = timeout - answer / 2, 2 * answer + timeout / 4
        self._since: dict[str, float] = {}
        self._last: float | None = None

    def note(self, silent: Iterable[str], asked: float, now: float) -> dict[str, float]:
        """Notes who did not answer.

        Returns:
            Dict from the names of the dead to the seconds of their silence.
        """
        if self._last is not None and now - self._last > self._longest_gap:
            # This process itself was stopped: the time does not count.
            self._since.clear()
            silent = ()
        self._last = now
        self._since = {name: self._since.get(name, asked) for name in silent}
        spans = {name: now - since for name, since in self._since.items()}
        return {name: span for name, span in spans.items() if span >= self._limit}


class HeartbeatWatch:
    """Asks the other workers, from a separate thread, whether they are alive.

    Each asks all others, as it stands still itself; in a large cluster, its neighbours. A worker
    that finds one dead ends its own collectives with an error that names it, and in a large cluster
    tells the others, who may not ask that one.

    Args:
        timeout: Seconds without an answer after which a worker counts as dead.

    Attributes:
        lost: Names of the workers that count as dead.
    """

    def __init__(self, task: TaskConfig, timeout: float) -> None:
        self._task, self._timeout = task, timeout
        workers = [one for one in task.tasks() if one[0] in ("chief", "worker")]
        own = [one[:2] for one in workers].index((task.task_type, task.task_index))
        self._addresses = {
            task_name(job, index): address for job, index, address in neighbours(workers, own)
        }
        self._asks_some = is_large(len(workers))
        self._answer = min(_LONGEST_ANSWER_SECONDS, timeout / 8)
        self.lost: tuple[str, ...] = ()

    _asks = staticmethod(is_silent)

    def start(self, progress: Progress) -> None:
        """Begins to ask.

        Args:
            progress: `Progress` of this process. While steps go on, nobody is asked.
        """
        threading.Thread(
            target=self._run, args=(progress,), name="heartbeat watch", daemon=True
        ).start()

    def _run(self, progress: Progress) -> None:
        places = {name: places_of(address) for name, address in self._addresses.items()}
        silence = Silence(self._timeout, self._answer)
        entered: int | None = None
        with concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, len(places))) as pool:
            while not self.lost:
                time.sleep(self._answer / 4)
                before, entered = entered, progress.entered
                asked = time.monotonic()
                silent: list[str] = []
                if before == entered:
                    limits = [self._answer] * len(places)
                    try:
                        answers = list(pool.map(self._asks, places.values(), limits))
                    except RuntimeError:  # The interpreter ends, and with it all pools.
                        return
                    silent = [name for name, is_so in zip(places, answers) if is_so]
                dead = silence.note(silent, asked, time.monotonic())
                if dead:
                    self.lost = tuple(dead)
                    self._end(max(dead.values()))

    def _end(self, span: float) -> None:
        named = ", ".join(f"{name} ({self._addresses[name]})" for name in self.lost)
        cause = f"no answer for {span:.0f} s, with heartbeat_timeout={self._timeout:g}"
        message = failure.LOST + failure.lost_message(named, self._task.name, cause)
        logger.warning("%s", message.removeprefix(failure.LOST))
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)
        if self._asks_some:
            # In a thread: the first worker, which has the service, may be the dead one.
            threading.Thread(target=failure.report, args=[message], daemon=True).start()


# Ends a job in which only some workers have stopped within an epoch.
#
# `model.stop_training = True` after a batch ends the epoch on that worker; the others would wait in
# their next step for its gradients. The worker posts its stop in the key-value store of
# TensorFlow's coordination service, once; a worker that waits in a step reads it. While steps go
# on, nothing is sent: TensorFlow keeps some 20 kB for each request for a key that nobody has
# written, so that only those steps are looked at that take longer than others do, and more and more
# seldom.
#
# With `updates=`, workers may step without each other, and a worker that has stopped is missed only
# in a step that needs it. There a step has to wait for longer before it reads.


# So long for each so many workers, whom the first of them answers.
_LOOK_SECONDS, _WORKERS = 1.0, 32
# For a step that may be one without the others: longer than such a step takes.
_ALONE_SECONDS = 10.0


def watch(
    control: ControlPlane, progress: Progress, marks: StepMarks, takes_steps_alone: bool
) -> None:
    """Starts a thread that checks whether a step waits for a stopped worker.

    Args:
        takes_steps_alone: Whether workers may take steps without waiting for the others.
    """
    args = control, progress, marks, takes_steps_alone
    threading.Thread(target=_run, args=args, name="stop watch", daemon=True).start()


def _run(
    control: ControlPlane, progress: Progress, marks: StepMarks, takes_steps_alone: bool
) -> None:
    last, seconds = None, _LOOK_SECONDS * max(1, len(control.names) / _WORKERS)
    least = _ALONE_SECONDS if takes_steps_alone else seconds
    # Seconds that this step has stood still, and those before it; and when to look at it.
    still, usual, due = 0.0, 0.0, least
    while True:
        time.sleep(seconds)
        before, last = last, progress.entered
        stands = before == last and progress.doing == "training step"
        if stands and takes_steps_alone:
            # One that is traced, or has no data, waits for no worker either.
            stands = marks.state == RUNNING
        if not stands:
            usual, still = max(usual / 2, still), 0.0
            due = max(least, 1.5 * usual)
            continue
        still += seconds
        if still < due:
            continue
        due = 2 * still
        try:
            stop = control.stop_of_another()
            if stop is not None and stop.steps <= progress.steps and last == progress.entered:
                control.end_after(stop, progress.at)
                return
        except (tf.errors.OpError, ValueError):
            continue  # The job is about to end.
