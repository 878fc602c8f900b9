"""The few rows and columns of the tables that answer most questions."""

COLUMNS = [(2, "1gbit"), (2, "100mbit"), (4, "1gbit"), (4, "100mbit")]
HEADS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
# By work: the library and the method of the tables, what a reader calls it, and whether weights
# are those of one process.
ROWS = {
    "dense": [
        ("keras_psplus", "no_communication", "one step alone, nothing is sent", ""),
        ("keras_psplus", "all_reduce", "`MultiWorkerMirroredStrategy()`", "yes"),
        ("keras_psplus", "all_reduce_factors", '`compression="factors"`', "yes"),
        ("keras_psplus", "all_reduce_bf16", '`compression="bf16"`', "no"),
        ("keras_psplus", "all_reduce_int8", '`compression="int8"`', "no"),
        ("keras_psplus", "all_reduce_topk", '`compression="topk:0.01"`', "no"),
        ("keras_psplus", "all_reduce_powersgd", '`compression="powersgd:4"`', "no"),
        ("keras_psplus", "diloco", '`updates="diloco:32"`, int8', "no"),
        ("keras_psplus", "zero", '`shard="optimizer"`', "yes"),
        ("keras_psplus", "fsdp", '`shard="all"`', "yes"),
        ("keras_psplus", "async_parameter_server", "`ParameterServerStrategy()`", "no"),
        ("keras_psplus", "sync_parameter_server", '`ParameterServerStrategy(mode="sync")`', "yes"),
        ("tf_keras", "all_reduce", "tf_keras, `MultiWorkerMirroredStrategy`", "yes"),
        ("tf_keras", "parameter_server", "tf_keras, `ParameterServerStrategy`", "no"),
        ("jax", "data_parallel", "Keras on JAX, `DataParallel`", "yes"),
        ("torch", "ddp", "PyTorch, DDP", "yes"),
        ("torch", "ddp_bf16", "PyTorch, DDP, bf16 hook", "no"),
        ("torch", "ddp_powersgd_4", "PyTorch, DDP, PowerSGD(4) hook", "no"),
    ],
    "sparse": [
        ("keras_psplus", "single", "Keras, one process", ""),
        ("keras_psplus", "hybrid", "`HybridStrategy()`", "yes"),
        ("keras_psplus", "hybrid_int8", '`HybridStrategy()`, rows in `"int8"`', "no"),
        ("keras_psplus", "all_reduce", "`MultiWorkerMirroredStrategy()`", "yes"),
        ("keras_psplus", "all_reduce_bf16", '`compression="bf16"`', "no"),
        ("keras_psplus", "async_parameter_server", "`ParameterServerStrategy()`", "no"),
        ("tf_keras", "all_reduce", "tf_keras, `MultiWorkerMirroredStrategy`", "yes"),
        ("tf_keras", "parameter_server", "tf_keras, `ParameterServerStrategy`", "no"),
        ("jax", "data_parallel", "Keras on JAX, `DataParallel`", "yes"),
        ("torch", "alone", "PyTorch, one process", ""),
        ("torch", "ddp", "PyTorch, DDP, sparse gradients", "yes"),
    ],
}


def short(rows, work):
    """Milliseconds of a step, as Markdown.

    Args:
        rows: Of `figures.rows`.
        work: Name of the work.
    """
    found = {(r.workers, r.library, r.method, r.rate): r for r in rows if r.work == work}
    alone = {key[:3]: row for key, row in found.items() if row.path == "alone"}
    heads = " | ".join(f"{workers} workers, {HEADS[rate]}" for workers, rate in COLUMNS)
    lines = [
        f"| milliseconds a step | exact | {heads} |",
        "|---|---" + "|---:" * len(COLUMNS) + "|",
    ]
    for library, method, title, exact in ROWS.get(work, []):
        cells = []
        for workers, rate in COLUMNS:
            row = found.get((workers, library, method, rate))
            row = alone.get((workers, library, method), row)
            cells.append(_rounded(row))
        if any(cells):
            lines.append("| " + " | ".join([title, exact, *cells]) + " |")
    return "\n".join(lines)


def _rounded(row):
    if row is None:
        return ""
    if row.median is None:
        return "failed"
    # Halves go up, as in the README.
    return f"{int(row.median + 0.5):,}" if row.median >= 20 else f"{row.median:.1f}"
