"""Choice of `overlap_steps="auto"`: some synchronous steps are measured, the first ones at least.

2 steps | 6 measured ─► links take a part of the step ─► 3 steps | 6 measured, overlapping
   ▲                 └► they do not: no overlap            └► the faster way stays
   └── steps take twice or half as long as then: links, or batches, are others now
"""

from __future__ import annotations

import statistics

from keras_psplus.log import logger
from keras_psplus.parameter_server.tracing.traffic import TrafficTotals

# Steps that trace functions, or that the copies of weights are not there for yet.
_FIRST, _FIRST_OVERLAPPING = 2, 3
_MEASURED = 6
# Below that part of a step, or that many bytes a step and worker, nothing is to be gained.
_PART, _BYTES = 0.25, 1 << 20
_GAIN = 0.95
# Steps that differ so much from those that decided are measured again.
_CHANGE = 2.0


class OverlapChoice:
    """Whether steps overlap at present, `is_on`.

    The argument says so, or is None if measured steps are to show it.
    """

    def __init__(self, argument: bool | None, num_workers: int, totals: TrafficTotals) -> None:
        self.is_on = bool(argument)
        self._is_automatic = self._is_open = argument is None
        self._totals, self._num_workers = totals, num_workers
        self._seconds: list[float] = []
        self._before = 0.0, 0
        self._without = 0.0
        self._decided = 0.0
        # Doubled by a choice that is made again: what keeps changing is measured seldom.
        self._patience = _MEASURED
        self._choice: bool | None = None

    def note(self, seconds: float | None) -> None:
        """Notes how long a step took; None if a worker was missing from it.

        Such a step never overlaps, and is longer for the others. What is measured begins again.
        """
        if not self._is_automatic:
            return
        if seconds is None:
            self._seconds.clear()
            return
        if not self._is_open:
            self._watch(seconds)
            return
        first = _FIRST_OVERLAPPING if self.is_on else _FIRST
        self._seconds.append(seconds)
        if len(self._seconds) == first:
            self._before = self._cost()
        if len(self._seconds) < first + _MEASURED:
            return
        median = statistics.median(self._seconds[first:])
        if self.is_on:
            self._decide(
                median < _GAIN * self._without,
                min(median, self._without),
                f"they take {1e3 * median:.0f} ms then, and {1e3 * self._without:.0f} ms else",
            )
            return
        waited, sent = (after - before for after, before in zip(self._cost(), self._before))
        part = waited / sum(self._seconds[first:]) / self._num_workers
        sent /= _MEASURED * self._num_workers
        if part < _PART or sent < _BYTES:
            self._decide(
                False,
                median,
                f"{part:.0%} of a step of {1e3 * median:.0f} ms is waiting for links, which carry "
                f"{sent / 1e6:.2f} MB in it",
            )
            return
        self._without, self.is_on, self._seconds = median, True, []

    def _watch(self, seconds: float) -> None:
        self._seconds.append(seconds)
        if len(self._seconds) < self._patience:
            return
        median, self._seconds = statistics.median(self._seconds), []
        if not self._decided / _CHANGE < median < self._decided * _CHANGE:
            self.is_on, self._is_open = False, True
            logger.info(
                "steps take %.0f ms, no longer %.0f: whether they overlap is measured again",
                1e3 * median,
                1e3 * self._decided,
            )

    def _decide(self, is_on: bool, seconds: float, reason: str) -> None:
        self._patience = 2 * self._patience if is_on == self._choice else _MEASURED
        self.is_on = self._choice = is_on
        self._is_open, self._seconds, self._decided = False, [], seconds
        logger.info(
            'steps %s: %s; overlap_steps="auto"', "overlap" if is_on else "do not overlap", reason
        )

    def _cost(self) -> tuple[float, int]:
        return self._totals.seconds, sum(one.wire_bytes for one in self._totals.traffic())
