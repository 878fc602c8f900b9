"""Restarts of single tasks of a cluster, and the pauses before them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from keras_psplus.cluster.launcher.results import WRONG_COMMAND_LINE, describe

# A task that fails sooner after its start waits before the next one.
SHORT_SECONDS, LONGEST_PAUSE_SECONDS = 30.0, 30.0


def pause_after(quick_failures: int) -> float:
    """Seconds to wait before a start, after some failures in a row that came soon."""
    return min(2.0 ** (quick_failures - 1), LONGEST_PAUSE_SECONDS) if quick_failures else 0.0


class TaskRestarts:
    """Tasks that have failed and are started again alone.

    Under parameter servers a job goes on without a worker, and takes it in again; a chief and a
    server are parts of the whole job, which is started again with them.

    Args:
        most: How many starts there may be, of all tasks together.
        log: Function that takes a line.
        jobs: Job types of the tasks that can be started again alone.

    Attributes:
        used: How many there have been.
    """

    def __init__(
        self, most: int, log: Callable[[str], None], jobs: Sequence[str] = ("worker",)
    ) -> None:
        self._most, self._log, self.used = most, log, 0
        self._jobs = jobs
        self._quick: dict[str, int] = {}
        # When each is due, and how it has ended.
        self._due: dict[str, tuple[float, int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._due

    def can_take(self, codes: Mapping[str, int]) -> bool:
        """Whether tasks that have failed at one time can all be started again alone.

        Args:
            codes: Dict from their names to their exit codes, negative for a signal.
        """
        return self.used + len(codes) <= self._most and all(
            name.rpartition("-")[0] in self._jobs and code != WRONG_COMMAND_LINE
            for name, code in codes.items()
        )

    def take(self, name: str, code: int, began: float) -> None:
        """Plans the next start of a task.

        Args:
            began: When it was started, by `time.monotonic()`.
        """
        self.used += 1
        is_quick = time.monotonic() - began < SHORT_SECONDS
        self._quick[name] = self._quick.get(name, 0) + 1 if is_quick else 0
        pause = pause_after(self._quick[name])
        self._due[name] = time.monotonic() + pause, code
        self._log(
            f"{name} has failed ({describe(code)}), and the others go on; restart {self.used} of "
            f"{self._most} begins in {pause:g} s"
        )

    def pop_due(self) -> list[str]:
        """Returns the tasks whose time has come; they are not due any more."""
        names = [name for name, (when, _) in self._due.items() if time.monotonic() >= when]
        for name in names:
            del self._due[name]
        return names

    def pop_all(self) -> dict[str, int]:
        """Gives up all planned starts; returns a dict from tasks to their exit codes."""
        codes = {name: code for name, (_, code) in self._due.items()}
        self._due.clear()
        return codes
