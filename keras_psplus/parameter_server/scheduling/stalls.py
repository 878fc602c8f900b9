"""Detection of closures that do not return, and of other answers that are overdue.

Other strategies' probes know one wait at a time, the present step; a chief has a closure under way
on each worker.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.stalls import PendingWait

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.parameter_server.scheduling.queue import ClosureQueue


class StallProbe(stalls.StallProbe):
    """Probe of `stalls.Inspector` on the chief.

    Args:
        spec: Dict from jobs to lists of addresses.
    """

    def __init__(
        self, queue: ClosureQueue, progress: Progress, spec: Mapping[str, Sequence[str]]
    ) -> None:
        super().__init__("chief-0", progress)
        self._queue = queue
        self._workers, self._servers = (
            {f"{job}-{i}": address for i, address in enumerate(spec[job])}
            for job in ("worker", "ps")
        )

    def look(self) -> dict[Any, PendingWait]:
        # Of several closures that a worker has under way, the first one.
        oldest: dict[int | None, Any] = {}
        for closure in self._queue.closures:
            first = oldest.get(closure.tried_on)
            if closure.started and (first is None or closure.started < first.started):
                oldest[closure.tried_on] = closure
        waits: dict[Any, PendingWait] = {
            (id(closure), closure.started): PendingWait(
                f"chief-0 at {closure.about}",
                functools.partial(self._of_closure, f"worker-{closure.tried_on}"),
                closure.started,
            )
            for closure in oldest.values()
        }
        # Its own calls wait for answers, too, also for those to what it has sent before.
        return waits or dict(super().look())

    def _of_closure(self, worker: str) -> str:
        asked = {worker: self._workers[worker], **self._servers}
        silent = stalls.unresponsive_tasks(asked)
        slow = {} if silent else stalls.slow_tasks(asked)
        if worker in silent:
            missing = f"{worker} (no answer; end its process, and another takes the closure)"
        elif silent:
            missing = f"{worker}, which is held up by {', '.join(silent)} (no answer)"
        elif slow:
            listed = ", ".join(
                f"{name} (answers after {took:.1f} s)" for name, took in slow.items()
            )
            missing = f"{worker}; slow: {listed}"
        else:
            missing = f"{worker}, which answers: it is slow, or has no data"
        return f"the closure; not arrived: {missing}"

    def describe(self, entered: int) -> str:
        lost = {f"worker-{index}" for index in self._queue.lost}
        there = {name: a for name, a in self._workers.items() if name not in lost}
        silent = stalls.unresponsive_tasks({**there, **self._servers})
        missing = ", ".join(f"{name} (no answer)" for name in silent)
        return f"an answer; not arrived: {missing or 'none; it may still trace, or wait for data'}"
