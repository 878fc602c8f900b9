"""Decisions: what differs by design, and what is refused, and why."""

import dataclasses
import fnmatch


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision on names in columns.

    Attributes:
        kind: `by design` or `refused`.
        family: The family, or a pattern.
        names: Patterns of names.
        columns: Columns.
        reason: The sentence on the page.
        link: The page that says so.
    """

    kind: str
    family: str
    names: tuple
    columns: tuple
    reason: str
    link: str
    title: str = "*"


_REPLICAS = (
    *("all-reduce", "two devices", "shard optimizer", "shard all", "sync servers"),
    *("sync servers, cut", "hybrid", "XLA"),
)
_PARTS = *_REPLICAS, "pipeline"


def _by_design(family, title, columns, reason, link):
    return Decision("by design", family, ("*",), columns, reason, link, title)


def _refused(family, title, columns, reason, link):
    return Decision("refused", family, ("*",), columns, reason, link, title)


# Of tables on servers.
_NO_ROWS = (
    *("callbacks: SwapEMAWeights", "optimizers with arguments: Adam, averaged"),
    *(
        "optimizers with arguments: Adam, overwritten",
        "optimizers with arguments: Adam, accumulated",
    ),
    *("optimizers: Lamb", "optimizers: Adafactor", "optimizers: Muon", "optimizers: Optimizer"),
    *("optimizers: MultiOptimizer", "optimizers: OptimizerMap", "optimizers: ScheduleFreeAdamW"),
    *("optimizers with arguments: Adafactor", "optimizers with arguments: Muon"),
    *("optimizers with arguments: ScheduleFreeAdamW", "optimizers with arguments: MultiOptimizer"),
)

# Of variables in shards.
_WHOLE = "optimizers: Lamb", "optimizers: Muon", "optimizers with arguments: Muon"

DECISIONS = [
    _by_design(
        "random",
        "random, seeded by a number",
        ("XLA",),
        "XLA draws other numbers from a seed, as it does in plain Keras.",
        "all_reduce.md#xla",
    ),
    _by_design(
        "programs",
        "programs: mixed bfloat16 kept in float32",
        ("XLA",),
        "XLA rounds less often between operations of 16 bits.",
        "all_reduce.md#xla",
    ),
    _by_design(
        "arguments of optimizers",
        "optimizers with arguments: Adam, accumulated",
        ("async servers",),
        "Sums of gradients are kept by the workers; weights are those of one process.",
        "parameter_server.md#limits",
    ),
    Decision(
        "by design",
        "callbacks",
        ("Callback",),
        ("async servers",),
        "Logs of a batch are those of the furthest batch whose step has come back.",
        "parameter_server.md",
    ),
    *(
        _by_design(
            "*",
            title,
            ("sync servers, cut", "async servers, cut"),
            "The optimizer sees each shard of a variable as a variable of its own.",
            "parameter_server.md#limits",
        )
        for title in (*_WHOLE, "optimizers: Optimizer")
    ),
    *(
        _refused(
            "*",
            title,
            ("sync servers, cut",),
            "It computes with whole rows and columns: keep variables whole.",
            "parameter_server.md#limits",
        )
        for title in ("optimizers: Adafactor", "optimizers with arguments: Adafactor")
    ),
    _refused(
        "layers",
        "layers: TFSMLayer",
        ("pipeline",),
        "Its function goes on reading the variables that it was loaded with: do not train it.",
        "pipeline.md#limits",
    ),
    *(
        _refused(
            "*",
            title,
            ("hybrid",),
            "Servers update rows by themselves, and know neither averages nor this formula.",
            "hybrid.md#what-they-do-with-rows",
        )
        for title in _NO_ROWS
    ),
    _refused(
        "compile",
        "compile: jit_compile",
        ("tensor parallel",),
        "Layers in parts talk to other workers: leave the default, `jit_compile='auto'`.",
        "tensor_parallel.md",
    ),
    _refused(
        "programs",
        "programs: tied weights",
        ("hybrid",),
        "Tables on servers are read by rows: keep one that is read whole on the workers.",
        "hybrid.md#limits",
    ),
    _refused(
        "programs",
        "programs: clipped gradients",
        ("sync servers", "sync servers, cut"),
        "A worker sees its part of a gradient alone: clip by the optimizer's arguments.",
        "sync_parameter_server.md#limits",
    ),
    _refused(
        "programs",
        "programs: tf_function in a layer",
        ("sync servers, cut", "async servers, cut"),
        "A variable in shards cannot be read in a function that the step calls.",
        "parameter_server.md#limits",
    ),
    _refused(
        "programs",
        "programs: jacobian by inputs",
        ("tensor parallel",),
        "What workers compute in parts is not vectorized: pass `experimental_use_pfor=False`.",
        "tensor_parallel.md",
    ),
    _refused(
        "compile",
        "compile: run_eagerly",
        (
            *("shard optimizer", "shard all", "tensor parallel", "pipeline", "sync servers"),
            *("sync servers, cut", "async servers"),
        ),
        "A worker runs traced functions only: debug a step in one process.",
        "limits.md",
    ),
    _by_design(
        "layers",
        "layers: random, *",
        _PARTS,
        "Each replica draws numbers of its own.",
        "differences.md#layers",
    ),
    _by_design(
        "random",
        "random, seeded by a generator",
        _PARTS,
        "Each replica draws numbers of its own.",
        "differences.md#layers",
    ),
    _by_design(
        "layers",
        "layers: statistics of rows",
        _PARTS,
        "Each replica takes the statistics of its own rows; with `synchronized=True`, of all.",
        "differences.md#layers",
    ),
    _by_design(
        "losses",
        "losses: *, of *",
        _REPLICAS,
        "The loss sees the rows of one replica.",
        "differences.md#losses-and-metrics",
    ),
    _by_design(
        "layers",
        "*, SpectralNormalization",
        ("pipeline",),
        "Each micro-batch takes one step of its power iteration.",
        "pipeline.md#what-differs-from-one-process",
    ),
]


def of(family, name, column, title):
    """Returns the decision on a name of a family in a column, or None."""
    for one in DECISIONS:
        if (
            fnmatch.fnmatch(family, one.family)
            and column in one.columns
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in one.names)
            and fnmatch.fnmatchcase(title, one.title)
        ):
            return one
    return None
