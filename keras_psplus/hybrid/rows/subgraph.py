"""Repeats what the ids of a batch are computed by, on those of another."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from keras_psplus.core.graph.subgraph import Subgraph, operations_before

_OF_VARIABLES = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_INPUTS = ("Placeholder", "PlaceholderWithDefault")


class NotRepeatable(ValueError):
    """A tensor's computation must not be repeated, for the reason given."""


def repeat(tensor: tf.Tensor, sources: Mapping[Any, tf.Tensor]) -> tf.Tensor:
    """Repeats the operations between some tensors and one that is made of them.

    Args:
        tensor: Symbolic tensor.
        sources: Dict from references of tensors of the same graph to those in their place.

    Returns:
        Tensor in the same graph. What does not depend on the sources is not repeated.

    Raises:
        NotRepeatable: If there are operations with side effects among them, or variables.
    """
    for operation in operations_before([tensor], sources):
        _check_repeatable(operation)
    return Subgraph([tensor], [reference.deref() for reference in sources]).repeat(
        sources, "next_batch"
    )[0]


def _check_repeatable(operation: tf.Operation) -> None:
    kind = operation.type
    if kind in _INPUTS or kind.startswith("LookupTable") or not operation.op_def.is_stateful:
        return
    if kind in _OF_VARIABLES or kind.startswith("Rpc"):
        raise NotRepeatable("its ids depend on variables, or on rows of a table")
    raise NotRepeatable(f"its ids depend on an operation that is not to be run twice ({kind})")
