"""Checks of `Dataset.map` functions: whether one may be run on some elements only.

It may, if its result for an element depends on that element alone. The operations in its graph show
it: stateful operations are registered as such.
"""

from __future__ import annotations

import re
from typing import Any

from keras_psplus.datasets.graph import scopes
from keras_psplus.tf_internals import op_def_registry

# They have state, and nothing that they return depends on how often they have run.
_READ_ONLY = {
    "Assert",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "Print",
    "PrintV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
}
# They have the state of the functions that they call, which are looked at as well.
_CALLS = {"Case", "If", "StatefulPartitionedCall", "While"}
_CHANGES = re.compile(
    r"Assign|Resource(Scatter|Apply)|Rng|Stateful|LookupTable(Insert|Remove|Import)|.*Queue|.*Stack"
)
_PYTHON = {"EagerPyFunc", "PyFunc"}


def objection(function: Any, is_trusted: bool) -> str | None:
    """Says why a function must see all elements, in their order.

    Args:
        function: `ConcreteFunction` of a map.
        is_trusted: Whether the script has said that its maps keep nothing from one element to the
            next; it is believed where the graph does not show the contrary.

    Returns:
        What the map does, or None if the function may be run on some elements only.
    """
    graph = function.graph.as_graph_def()
    functions = {function.signature.name for function in graph.library.function}
    for nodes in scopes(graph):
        for node in nodes:
            found = _objection_to(node, functions, is_trusted)
            if found:
                return found
    return None


def _objection_to(node: Any, functions: set[str], is_trusted: bool) -> str | None:
    if node.op in _READ_ONLY or node.op in _CALLS or node.op in functions:
        return None
    definition = op_def_registry.get(node.op)
    if definition is not None and not definition.is_stateful:
        return None
    if "seed" in node.attr and "seed2" in node.attr:
        # Without seeds, one process would draw others at its next start.
        is_seeded = node.attr["seed"].i or node.attr["seed2"].i
        return f"draws random numbers from a seed ({node.op})" if is_seeded else None
    if _CHANGES.match(node.op):
        return f"changes a state ({node.op})"
    if is_trusted:
        return None
    what = "runs Python code" if node.op in _PYTHON else "may keep a state"
    return f"{what} ({node.op}), and AutoShardPolicy.DATA does not say that it keeps none"
