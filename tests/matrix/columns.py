"""Columns of the matrix: ways of training, on the clusters of `tests/support/layouts.py`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Column:
    """A way of training.

    Attributes:
        layout: Name of the cluster.
        head: Its name in the page's tables.
        strategy: Its description on the page.
        options: Further arguments of `compile`.
        only_programs: Whether no names but programs are run.
    """

    layout: str
    head: str
    strategy: str
    options: dict = dataclasses.field(default_factory=dict)
    only_programs: bool = False


_ALL_REDUCE = "`MultiWorkerMirroredStrategy`, two workers"
COLUMNS = {
    "all-reduce": Column("ar2", "AR", _ALL_REDUCE),
    "two devices": Column(
        "devices2", "2 dev", "`MultiWorkerMirroredStrategy`, two devices in one process"
    ),
    "shard optimizer": Column(
        "opt2", "opt", '`MultiWorkerMirroredStrategy(shard="optimizer")`, two workers'
    ),
    "shard all": Column("all2", "all", '`MultiWorkerMirroredStrategy(shard="all")`, two workers'),
    "tensor parallel": Column("tp2", "TP", "`ModelParallelStrategy()`, two workers on one row"),
    "hybrid": Column("hybrid22", "hyb", "`HybridStrategy`, two workers, tables on two servers"),
    "sync servers": Column(
        "sync_threads", "sync", '`ParameterServerStrategy(mode="sync")`, two workers'
    ),
    "sync servers, cut": Column(
        "sync_sharded", "sync cut", "the same, with a partitioner of two shards"
    ),
    "async servers": Column("async_threads", "async", "`ParameterServerStrategy()`, one worker"),
    "async servers, cut": Column(
        "async_sharded",
        "async cut",
        "the same, with a partitioner of two shards: programs alone",
        only_programs=True,
    ),
    "pipeline": Column("pipeline2", "pipe", "`PipelineStrategy`, two stages, three micro-batches"),
    "XLA": Column(
        "ar2", "XLA", f"{_ALL_REDUCE}, `compile(jit_compile=True)`", {"jit_compile": True}
    ),
}
