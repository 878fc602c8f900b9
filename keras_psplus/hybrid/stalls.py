"""Detection of missing tasks when a worker waits for a table or for pushes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_psplus.all_reduce.liveness import stalls as all_reduce_stalls
from keras_psplus.all_reduce.liveness.step_marks import StepMarks
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.progress import Progress

if TYPE_CHECKING:
    from keras_psplus.hybrid.strategy import HybridStrategy


class StallProbe(all_reduce_stalls.StallProbe):
    """Probe of `stalls.Inspector` on a worker.

    Args:
        strategy: `HybridStrategy`.
        progress: `Progress` of this process.
        marks: `StepMarks` of this process.
    """

    def __init__(self, strategy: HybridStrategy, progress: Progress, marks: StepMarks) -> None:
        assert strategy.task is not None
        super().__init__(strategy.task, progress, marks)
        self._strategy = strategy

    def describe(self, entered: int) -> str:
        servers = self._strategy._servers
        assert servers is not None
        silent = stalls.unresponsive_tasks(servers.addresses)
        if silent:
            return f"a table; not arrived: {', '.join(silent)} (no answer)"
        if self._strategy.sync and self._is_ahead(servers.pushes()):
            return f"the barrier of the tables; not arrived: {self.missing(entered)}"
        return super().describe(entered)

    def _is_ahead(self, pushes):
        """Whether this worker has pushed at a step at which another one has not."""
        world = self._strategy.extended.world
        own = range(world.rank, world.rank + world.local_replicas)
        return any(max(of_table[i] for i in own) > min(of_table) for of_table in pushes)
