"""Who has not come, when a worker waits for a table or for the others' pushes to it."""

from keras_psplus.all_reduce import stalls as all_reduce_stalls
from keras_psplus.cluster import stalls


class Waits(all_reduce_stalls.Waits):
    """What `stalls.Inspector` looks at, on a worker.

    Args:
        strategy: `HybridStrategy`.
        progress: `Progress` of this process.
        marks: `StepMarks` of this process.
    """

    def __init__(self, strategy, progress, marks):
        super().__init__(strategy.task, progress, marks)
        self._strategy = strategy

    def describe(self, entered):
        servers = self._strategy.servers
        silent = stalls.silent(servers.addresses)
        if silent:
            return f"a table; not arrived: {', '.join(silent)} (no answer)"
        if self._strategy.sync and self._is_ahead(servers.pushes()):
            return f"the fence of the tables; not arrived: {self.missing(entered)}"
        return super().describe(entered)

    def _is_ahead(self, pushes):
        """Whether this worker has pushed at a step at which another one has not."""
        world = self._strategy.extended.world
        own = range(world.rank, world.rank + world.local_replicas)
        return any(max(of_table[i] for i in own) > min(of_table) for of_table in pushes)
