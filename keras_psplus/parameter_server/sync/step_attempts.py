"""Attempts at a global step, with the gradients that count and restarts."""

import collections
import itertools
import threading
from typing import Any

from keras_psplus.log import logger


class Attempt:
    """One try at a global step, by shares of its batch.

    The gradients of the first `wanted` shares that are admitted count. A share that comes to be
    computed again, after its worker was lost, may have been added in part before: the attempt is
    void then. Its stamp is larger than that of every attempt before.
    """

    def __init__(self, stamp: int, wanted: int) -> None:
        self.stamp, self.wanted = stamp, wanted
        self._lock = threading.Lock()
        self._admitted: set[int] = set()
        self.results: dict[int, Any] = {}
        self.is_void = False

    def admit(self, share: int) -> bool:
        """Whether to add the gradients of a share; called before any is added."""
        with self._lock:
            if share in self._admitted:
                self.is_void = True
            if self.is_over or len(self._admitted) >= self.wanted:
                return False
            self._admitted.add(share)
            return True

    def finish(self, share: int, result: Any) -> None:
        """Notes that a share's gradient has been added, and what it has brought back."""
        with self._lock:
            self.results[share] = result

    @property
    def is_over(self) -> bool:
        """Whether nothing that comes from now on counts."""
        return self.is_void or len(self.results) >= self.wanted


class StepAttempts:
    """The global steps of a strategy.

    Attributes:
        failures: How many steps an error has ended before their update.
        overlapped: How many steps have begun from copies that came during the step before.
    """

    def __init__(self, backup_workers: int) -> None:
        self.backup_workers = backup_workers
        self.failures = self.overlapped = 0
        self._stamps = itertools.count(1)
        self._dropped: collections.Counter[int] = collections.Counter()
        self._steps = self._logged = 0

    def begin(self, shares: int, workers: int) -> Attempt:
        wanted = max(1, min(shares, workers - self.backup_workers))
        return Attempt(next(self._stamps), wanted)

    def count(self, attempt: Attempt, shares: int) -> None:
        """Counts the gradients, of so many shares, that a step has done without."""
        self._steps += 1
        self._dropped.update(share for share in range(shares) if share not in attempt.results)

    @property
    def dropped(self) -> int:
        return self._dropped.total()

    def log_dropped(self) -> None:
        """Logs how many gradients have been dropped, if there are more than the last time."""
        if self.dropped == self._logged:
            return
        self._logged = self.dropped
        of_workers = ", ".join(f"worker-{i}: {n}" for i, n in sorted(self._dropped.items()))
        logger.info(
            "%d gradients of %d steps came late and were dropped (%s); backup_workers=%d",
            self.dropped,
            self._steps,
            of_workers,
            self.backup_workers,
        )
