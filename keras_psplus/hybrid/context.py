"""The objects of a strategy that its tables are made with."""

import dataclasses

from keras_psplus.hybrid.rpc.servers import Servers
from keras_psplus.hybrid.snapshots.snapshot_schedule import Snapshots
from keras_psplus.hybrid.tables.placement import TablePlacer
from keras_psplus.hybrid.tables.registry import Tables


@dataclasses.dataclass(eq=False)
class TableContext:
    """The objects of a `HybridStrategy` that its tables are made with.

    Parts take this, or what they use of it, instead of the strategy, which makes all of them.

    Attributes:
        servers: The parameter servers.
        tables: The tables on them.
        placer: Decides which tables lie there.
        snapshots: Copies of the job's state, with `snapshot_every`; else None.
    """

    servers: Servers
    tables: Tables
    placer: TablePlacer
    snapshots: Snapshots | None = None
