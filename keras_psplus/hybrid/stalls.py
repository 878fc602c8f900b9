"""Detection of missing tasks when a worker waits for a table or for pushes."""

from collections.abc import Callable, Iterable, Sequence

from keras_psplus.all_reduce.liveness import stalls as all_reduce_stalls
from keras_psplus.all_reduce.liveness.stalls import StepMarks
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.core.batch.batches import World
from keras_psplus.hybrid.rpc.servers import Servers


class StallProbe(all_reduce_stalls.StallProbe):
    """Probe of `stalls.Inspector` on a worker.

    Args:
        task, progress, marks: As for all-reduce.
        is_sync: Whether servers apply a step's gradients of all workers at once.
        servers: Function that returns the `Servers`, which are there before the first step.
    """

    def __init__(
        self,
        task: TaskConfig,
        progress: Progress,
        marks: StepMarks,
        world: World,
        is_sync: bool,
        servers: Callable[[], Servers],
    ) -> None:
        super().__init__(task, progress, marks)
        self._world, self._is_sync, self._servers = world, is_sync, servers

    def describe(self, entered: int) -> str:
        servers = self._servers()
        silent = stalls.unresponsive_tasks(dict(servers.peers))
        if silent:
            return f"a table; not arrived: {', '.join(silent)} (no answer)"
        if self._is_sync and self._is_ahead(servers.pushes()):
            return f"the barrier of the tables; not arrived: {self.missing(entered)}"
        return super().describe(entered)

    def _is_ahead(self, pushes: Iterable[Sequence[int]]) -> bool:
        """Whether this worker has pushed at a step at which another one has not."""
        own = range(self._world.rank, self._world.rank + self._world.local_replicas)
        return any(max(of_table[i] for i in own) > min(of_table) for of_table in pushes)
