"""The graph of a `tf.data.Dataset`: its stages, and the constants that they are made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.tf_internals import graph_pb2

if TYPE_CHECKING:
    import numpy as np


def graph_of(dataset: tf.data.Dataset) -> graph_pb2.GraphDef:
    """Writes a dataset out as a `GraphDef`.

    Raises:
        tf.errors.OpError: If the dataset cannot be written out.
        ValueError: If it is larger than a `GraphDef` can be.
    """
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    serialized = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    return graph_pb2.GraphDef.FromString(serialized)


def scopes(graph: graph_pb2.GraphDef) -> list[Any]:
    """Lists of nodes of a `GraphDef`: the graph's, and each function's."""
    return [graph.node, *(function.node_def for function in graph.library.function)]


def constant_value(node: Any) -> np.ndarray:
    """The value of a `Const` node as a NumPy array."""
    return tf.make_ndarray(node.attr["value"].tensor)


def reads_service(node: Any) -> bool:
    """Whether a node reads from the tf.data service."""
    return node.op.startswith("DataServiceDataset")


def has_stage(dataset: tf.data.Dataset, names: Sequence[str]) -> bool:
    """Whether the class name of a dataset, or of its inputs, contains a text."""
    if any(name in type(dataset).__name__ for name in names):
        return True
    return any(has_stage(below, names) for below in dataset._inputs())
