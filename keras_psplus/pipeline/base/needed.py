"""Operations of a graph that are executed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus.core.graph.subgraph import with_inputs

# They change nothing, though TensorFlow counts them as if they did.
_READS = ("Placeholder", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp")


def operations(graph: tf.Graph, results: Any) -> set[tf.Operation]:
    """The operations whose results are returned, or change something.

    Args:
        graph: Graph of a function that is being traced.
        results: Structure of what the function returns.
    """
    waiting = [leaf.op for leaf in tf.nest.flatten(results, expand_composites=True) if _is_in(leaf)]
    for op in graph.get_operations():
        if op._is_stateful and op.type not in _READS:
            waiting.append(op)
    return with_inputs(waiting)


def _is_in(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and hasattr(leaf, "graph")
