"""Imports run downwards: each package imports only what is below it."""

import ast
import re

from tests import structure
from tests.support.tables import for_each

ROOT = structure.ROOT / structure.PACKAGE
# From the bottom to the top: a line is a layer.
LAYERS = """
log process_identity
activation
arguments errors files specs text_table
keras_internals
tf_internals communication planning versions
engine
cluster native
catalogue
compression datasets sidecar_evaluator tables updates
callbacks
core layers
all_reduce parameter_server pipeline serving
sharding
hybrid tensor_parallel
keras_hooks
cli
"""
# Within a package: its folders and files, from the bottom to the top.
FOLDERS = """
all_reduce: data collectives liveness startup reduction topology shard_option step reducers extended
    engine strategy
cli: foreign_calls flags bench manifests serve status add_worker
    host_doctor doctor remote_task run exec plan export main
cluster: config console ports process environment channel handshake discovery monitor preflight
    launcher serving processes testing in_process
compression: outer_products averaging options base no_communication by_variable rows quantize
    cast low_rank sufficient_factors sparse error_feedback methods wire
core: jobs base worker_state seeds data_position graph plan batch gradient_path backup live
    models strategy_engine distributed_engine
hybrid: rows calls servers tables saving server_tables extended server engine strategy
layers: dynamic_embedding
parameter_server: worker_function traffic data state pulls aggregation dynamic_table extended queue
    scheduler context replica_step step_functions worker_updates runner sync_functions
    sync_steps engine strategy
pipeline: stages schedule boundary microbatches replicas traffic costs plan splitter context
    traced_step step_function pipedream engine strategy
sharding: places variable exchange sums store weight units plan extended engine full_engine
tensor_parallel: mesh group variable rules mesh_row layer_calls plan engine strategy
tables: policies keys rounding chunks index row_optimizer admission snapshot store files
    row_variable local imports versions reader
"""
LAYERS = [set(line.split()) for line in LAYERS.strip().splitlines()]
FOLDERS = {
    package: names.split() for package, names in re.findall(r"^(\w+): ([^:]*)$", FOLDERS, re.M)
}
# The package itself, whose import installs the hooks, and what runs the command line.
TOP = {"__init__", "__main__"}
KNOWN = set().union(*LAYERS)


def imported(path, with_types=True):
    """The modules that a file imports from the library, as lists of names without the library's."""
    if path not in structure.trees():
        return
    nodes = [structure.trees()[path]]
    while nodes:
        node = nodes.pop()
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (n.split(".")[1:] for n in names if n.startswith("keras_psplus."))
        skips = not with_types and structure.is_for_types(node)
        nodes += node.orelse if skips else ast.iter_child_nodes(node)


def files():
    for path in structure.trees():
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package not in TOP:
            yield package, path


def test_every_package_has_a_layer():
    assert {package for package, _ in files()} == KNOWN


@for_each("layer", range(len(LAYERS)))
def test_imports_run_downwards(layer):
    below = set().union(*LAYERS[:layer])
    for package, path in files():
        if package in LAYERS[layer]:
            others = {name for name, *_ in imported(path) if name != package and name in KNOWN}
            assert others <= below, f"{path} imports {sorted(others - below)}"


@for_each("package", FOLDERS)
def test_imports_run_downwards_in_a_package(package):
    order = FOLDERS[package]
    entries = [p for p in (ROOT / package).iterdir() if p.suffix == ".py" or any(p.glob("*.py"))]
    names = {p.stem for p in entries} - {"__init__", "__pycache__"}
    assert names == set(order) and len(names) == len(order)
    for name in order:
        below = order[: order.index(name) + 1]
        for path in [ROOT / package / f"{name}.py", *(ROOT / package / name).rglob("*.py")]:
            inside = [i for i in imported(path, with_types=False) if len(i) > 1]
            found = {i[1] for i in inside if i[0] == package and i[1] in order}
            assert found <= set(below), f"{path} imports {sorted(found - set(below))}"
