"""The objects of a strategy that its tables are made with."""

import dataclasses

from keras_psplus.hybrid.files.server_tables import ServerTables
from keras_psplus.hybrid.rpc.servers import Servers
from keras_psplus.hybrid.tables.placement import TablePlacer, Tables


@dataclasses.dataclass(eq=False)
class TableContext:
    """The objects of a `HybridStrategy` that its tables are made with.

    Parts take this, or what they use of it, instead of the strategy, which makes all of them.
    """

    servers: Servers
    tables: Tables
    placer: TablePlacer
    backup_tables: ServerTables
