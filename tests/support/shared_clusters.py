"""Which tests one process of pytest runs in a row, so that their clusters start once.

`pytest --dist loadfile` gives files to whoever is free, and each would start anew the layouts of
`layouts.py` that it needs.
"""

# By the cluster that most of their tests run in: files, and columns of the matrix, in an order in
# which few others come between.
SHARED = {
    "ar2": (
        *("all_reduce/test_compression.py", "all_reduce/test_own_steps.py"),
        *("all_reduce/test_same_data.py", "all_reduce/test_updates.py"),
        *("multi_process/test_behaviours.py", "multi_process/test_data.py"),
        *("multi_process/test_equals_one_process.py", "all-reduce", "support/test_cluster.py"),
    ),
    "tp2": (
        *("tensor parallel", "tensor_parallel/test_control_flow.py"),
        *("tensor_parallel/test_model_parallel.py", "multi_process/test_eager_gradients.py"),
        *("shard all", "sharding/test_full_shares.py", "serving/test_archive.py"),
    ),
    "hybrid22": (
        *("hybrid", "tables/test_imports.py", "hybrid/test_cache.py", "hybrid/test_dynamic.py"),
        *("hybrid/test_usage.py", "hybrid/test_training.py"),
    ),
    "async22": (
        *("parameter_server/test_callbacks.py", "parameter_server/test_steps.py"),
        *("parameter_server/test_worker_data.py", "parameter_server/test_updates.py"),
        "parameter_server/test_compression.py",
    ),
    "sync22": (
        *("parameter_server/test_dynamic.py", "serving/test_publishing.py"),
        "parameter_server/test_sync_overlap.py",
    ),
    "sync_threads": (
        *("sync servers", "multi_process/test_variables_without_a_shape.py"),
        *("parameter_server/test_late_reads.py", "sync servers, cut"),
    ),
    "opt2": ("shard optimizer", "sharding/test_shares.py"),
    "pipeline2": ("pipeline", "pipeline/test_processes.py"),
}
_PLACES = {
    what: (layout, place)
    for place, (layout, what) in enumerate(
        (layout, what) for layout, row in SHARED.items() for what in row
    )
}
_NOWHERE = (None, len(_PLACES))


def place_of(nodeid):
    """The row's name and a number by which tests are sorted; None and the last for all others."""
    file = nodeid.partition("::")[0].removeprefix("tests/")
    column = nodeid.rpartition("-")[2].removesuffix("]") if "[" in nodeid else ""
    return _PLACES.get(column if file == "matrix/test_matrix.py" else file, _NOWHERE)


def scheduling(config, log):
    """The scheduler of `--dist loadfile` that keeps the tests of a row together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return place_of(nodeid)[0] or super()._split_scope(nodeid)

    return Scheduling(config, log)
