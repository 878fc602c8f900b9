"""Decisions: what differs by design, and what is refused, and why."""

import dataclasses
import fnmatch


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision on bundles in columns.

    Attributes:
        kind: `by design` or `refused`.
        titles: Patterns of the bundles' titles.
        columns: The columns.
        reason: The sentence on the page.
        link: The page that says so.
        names: The names of the bundles that it is on; None for all.
    """

    kind: str
    titles: tuple
    columns: tuple
    reason: str
    link: str
    names: tuple | None = None


_REPLICAS = (
    *("all-reduce", "two devices", "shard optimizer", "shard all", "sync servers"),
    *("sync servers, cut", "hybrid", "XLA"),
)
_PARTS = *_REPLICAS, "pipeline"
DECISIONS = [
    Decision(
        "by design",
        ("random, seeded by a number",),
        ("XLA",),
        "XLA draws other numbers from a seed, as it does in plain Keras.",
        "gpus.md#xla",
    ),
    Decision(
        "by design",
        ("programs: mixed bfloat16 kept in float32",),
        ("XLA",),
        "XLA rounds less often between operations of 16 bits.",
        "gpus.md#xla",
    ),
    Decision(
        "by design",
        ("optimizers with arguments: Adam, accumulated",),
        ("async servers",),
        "Sums of gradients are kept by the workers; weights are those of one process.",
        "parameter_server.md#limits",
    ),
    Decision(
        "by design",
        ("callbacks",),
        ("async servers",),
        "Logs of a batch are those of the furthest batch whose step has come back.",
        "parameter_server.md",
        ("Callback",),
    ),
    Decision(
        "by design",
        (
            "optimizers: Lamb",
            "optimizers: Muon",
            "optimizers with arguments: Muon",
            "optimizers: Optimizer",
        ),
        ("sync servers, cut", "async servers, cut"),
        "The optimizer sees each shard of a variable as a variable of its own.",
        "parameter_server.md#limits",
    ),
    Decision(
        "by design",
        ("layers: of tokens", "arguments of layers: of tokens"),
        ("hybrid",),
        "Rows that a step does not touch stay as they are, with their momenta.",
        "hybrid.md#what-they-do-with-rows",
        ("Embedding", "Embedding (constrained)", "Embedding (masked)"),
    ),
    Decision(
        "refused",
        ("optimizers: Adafactor", "optimizers with arguments: Adafactor"),
        ("sync servers, cut",),
        "It computes with whole rows and columns: keep variables whole.",
        "parameter_server.md#limits",
    ),
    Decision(
        "refused",
        ("layers: TFSMLayer",),
        ("pipeline",),
        "Its function goes on reading the variables that it was loaded with: do not train it.",
        "pipeline.md#limits",
    ),
    Decision(
        "refused",
        (
            "callbacks: SwapEMAWeights",
            "optimizers with arguments: Adam, averaged",
            "optimizers with arguments: Adam, overwritten",
            "optimizers with arguments: Adam, accumulated",
            "optimizers: Lamb",
            "optimizers: Adafactor",
            "optimizers: Muon",
            "optimizers: Optimizer",
            "optimizers: ScheduleFreeAdamW",
            "optimizers with arguments: Adafactor",
            "optimizers with arguments: Muon",
            "optimizers with arguments: ScheduleFreeAdamW",
        ),
        ("hybrid",),
        "Servers update rows by themselves, and know neither averages nor this formula.",
        "hybrid.md#what-they-do-with-rows",
    ),
    Decision(
        "refused",
        ("compile: jit_compile",),
        ("tensor parallel",),
        "Layers in parts talk to other workers: leave the default, `jit_compile='auto'`.",
        "tensor_parallel.md",
    ),
    Decision(
        "refused",
        ("programs: tied weights",),
        ("hybrid",),
        "Tables on servers are read by rows: keep one that is read whole on the workers.",
        "hybrid.md#limits",
    ),
    Decision(
        "refused",
        ("programs: table for any id*",),
        (
            *("all-reduce", "two devices", "shard optimizer", "shard all", "tensor parallel"),
            *("pipeline", "XLA"),
        ),
        "Its rows lie on servers: use `HybridStrategy` or `ParameterServerStrategy`.",
        "dynamic_tables.md#strategies",
    ),
    Decision(
        "refused",
        ("programs: clipped gradients",),
        ("sync servers", "sync servers, cut"),
        "A worker sees its part of a gradient alone: clip by the optimizer's arguments.",
        "sync_parameter_server.md#limits",
    ),
    Decision(
        "refused",
        ("programs: tf_function in a layer",),
        ("sync servers, cut", "async servers, cut"),
        "A variable in shards cannot be read in a function that the step calls.",
        "parameter_server.md#limits",
    ),
    Decision(
        "refused",
        ("programs: jacobian by inputs",),
        ("tensor parallel",),
        "What workers compute in parts is not vectorized: pass `experimental_use_pfor=False`.",
        "tensor_parallel.md",
    ),
    Decision(
        "refused",
        ("compile: run_eagerly",),
        (
            "shard optimizer",
            "shard all",
            "tensor parallel",
            "pipeline",
            "sync servers",
            "sync servers, cut",
            "async servers",
        ),
        "A worker runs traced functions only: debug a step in one process.",
        "choose.md#requirements",
    ),
    Decision(
        "by design",
        ("layers: random, *", "random, seeded by a generator"),
        _PARTS,
        "Each replica draws numbers of its own.",
        "differences.md#layers",
    ),
    Decision(
        "by design",
        ("layers: statistics of rows",),
        _PARTS,
        "Each replica takes the statistics of its own rows; with `synchronized=True`, of all.",
        "differences.md#layers",
    ),
    Decision(
        "by design",
        ("losses: *, of *",),
        _REPLICAS,
        "The loss sees the rows of one replica.",
        "differences.md#losses-and-metrics",
    ),
    Decision(
        "by design",
        ("*, SpectralNormalization",),
        ("pipeline",),
        "Each micro-batch takes one step of its power iteration.",
        "pipeline.md#what-differs-from-one-process",
    ),
]


def of(title, name, column):
    """Returns the decision on a name of a bundle in a column, or None."""
    for one in DECISIONS:
        is_on = one.names is None or name in one.names
        if is_on and column in one.columns:
            if any(fnmatch.fnmatchcase(title, pattern) for pattern in one.titles):
                return one
    return None
