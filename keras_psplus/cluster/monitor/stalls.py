"""Says what a process waits for, and for whom, when that takes long."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from keras_psplus.arguments import seconds
from keras_psplus.cluster import handshake
from keras_psplus.cluster.monitor import task_report
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.log import logger

_LOOKS_PER_LIMIT, _LONGEST_LOOK_SECONDS = 4, 5.0
_ANSWER_SECONDS = 2.0
_SLOW_SECONDS, _SLOW_FACTOR = 0.1, 5
_Name = TypeVar("_Name")


def check_stall_warning(stall_warning: float | None) -> float | None:
    """Returns the argument `stall_warning`."""
    return seconds("stall_warning", stall_warning, or_none=True)


class WarningSchedule:
    """Schedule of warnings about a long wait: at a limit, and at each doubling."""

    def __init__(self, limit: float | None) -> None:
        self._next = float("inf") if limit is None else limit
        self.has_warned = False

    def is_due(self, waited: float) -> bool:
        """Whether a warning is due, after so many seconds."""
        return waited >= self._next

    def note_warned(self, waited: float) -> None:
        self.has_warned = True
        while self._next <= waited:
            self._next *= 2


@dataclasses.dataclass
class PendingWait:
    """Something that is waited for.

    Args:
        what: Who waits at which step, for people.
        describe: Function that says for what operation, and who has not arrived. It is called when
            a warning is due, and may take some seconds.
        since: `time.monotonic()` when it began; None for when it is first seen.
    """

    what: str
    describe: Callable[[], str]
    since: float | None = None


class StallProbe:
    """Probe of `Inspector`: the present step of a process."""

    def __init__(self, who: str, progress: Progress) -> None:
        self._who, self._progress = who, progress

    def look(self) -> dict[int, PendingWait]:
        """Waits that are pending at present, by step."""
        at, entered = self._progress.at, self._progress.entered
        if at is None:
            return {}
        return {entered: PendingWait(f"{self._who} at {at}", lambda: self.describe(entered))}

    def describe(self, entered: int) -> str:
        """Describes what a step waits for, and who is missing."""
        raise NotImplementedError


class Inspector:
    """Looks now and then, from a separate thread, at what is waited for.

    Args:
        limit: Seconds after which a wait is logged, and again after each doubling; None for never.
        look: Function that returns what is waited for just now, a dict from anything that tells
            waits apart to `PendingWait`s.
    """

    def __init__(self, limit: float | None, look: Callable[[], Mapping[Any, PendingWait]]) -> None:
        self._limit, self._look = limit, look
        self._known: dict[Any, tuple[PendingWait, float, WarningSchedule]] = {}
        if limit is not None:
            self.seconds = min(limit / _LOOKS_PER_LIMIT, _LONGEST_LOOK_SECONDS)
            threading.Thread(target=self._run, name="stall inspector", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self.seconds)
            try:
                self._inspect(time.monotonic())
            except Exception as error:  # It must not end what it only watches.
                logger.warning("could not find out what is waited for: %s", error)

    def _inspect(self, now: float) -> None:
        waits, report = self._look(), task_report.current()
        for key in [key for key in self._known if key not in waits]:
            wait, since, schedule = self._known.pop(key)
            if schedule.has_warned:
                logger.warning("%s goes on after %.0f s", wait.what, now - since)
                if report is not None:
                    report.stall_over(wait.what, now - since)
        for key, wait in waits.items():
            if key not in self._known:
                since = now if wait.since is None else wait.since
                self._known[key] = wait, since, WarningSchedule(self._limit)
            _, since, schedule = self._known[key]
            if not schedule.is_due(now - since):
                continue
            described = wait.describe()
            if key in self._look():  # It may have come while others were asked.
                logger.warning("%s has waited %.0f s for %s", wait.what, now - since, described)
                schedule.note_warned(now - since)
                if report is not None:
                    report.stall(wait.what, now - since, described)


def unresponsive_tasks(addresses: Mapping[_Name, str]) -> list[_Name]:
    """Names of the tasks whose servers do not respond: dead, hanging or cut off."""
    if not addresses:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(16, len(addresses))) as pool:
        answers = pool.map(
            lambda a: handshake.grpc_responds(a, _ANSWER_SECONDS), addresses.values()
        )
    return [name for name, answers in zip(addresses, answers) if not answers]


def slow_tasks(addresses: Mapping[str, str]) -> dict[str, float]:
    """Tasks whose servers answer much later than the others': they or their links are slow."""
    if len(addresses) < 2:
        return {}
    with concurrent.futures.ThreadPoolExecutor(min(16, len(addresses))) as pool:
        seconds = dict(zip(addresses, pool.map(_seconds_to_answer, addresses.values())))
    usual = statistics.median_low(seconds.values())
    slow = max(_SLOW_SECONDS, _SLOW_FACTOR * usual)
    return {name: took for name, took in seconds.items() if slow <= took < _ANSWER_SECONDS}


def _seconds_to_answer(address: str) -> float:
    begin = time.monotonic()
    return (
        time.monotonic() - begin
        if handshake.grpc_responds(address, _ANSWER_SECONDS)
        else _ANSWER_SECONDS
    )
