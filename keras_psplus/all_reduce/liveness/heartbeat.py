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

from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.startup.peer_sampling import is_large, neighbours
from keras_psplus.cluster.wire.unresponsive import is_silent, places_of
from keras_psplus.core.jobs import error_report, failure
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.progress import Progress

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

        Args:
            asked: When they were asked.
            now: What time it is.

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
            threading.Thread(target=error_report.report, args=[message], daemon=True).start()
