"""Gradients that a loop of the graph has returned, for each replica's rows.

Their mean over the replicas is right for what is linear in them, as a mean over micro-batches, and
for what is computed row by row, but a norm of one replica's is none of the global batch's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.core.graph import stand_ins

_LOOPS = "While", "StatelessWhile"
# Types of operations that are linear in all inputs.
_LINEAR = {
    *("Add", "AddN", "AddV2", "Cast", "ConcatV2", "ExpandDims", "Identity", "Mean", "Neg", "Pack"),
    *("Reshape", "StridedSlice", "Squeeze", "Sub", "Sum", "Transpose"),
}
# And in one of them; in the first, if the other is what that is divided by.
_BILINEAR, _QUOTIENTS = {"Mul", "MulNoNan"}, {"Div", "DivNoNan", "RealDiv"}


def nonlinear_use(
    gradient: tf.Tensor | tf.IndexedSlices, bodies: Collection[str], variables: Iterable[Any]
) -> str | None:
    """Type of an operation that is not linear in loops' results, or None.

    Args:
        gradient: What has been computed.
        bodies: Names of the loops' bodies in which gradients were taken.
        variables: The variables that they are the gradients of. What is returned for each row has
            another shape than they have.
    """
    shapes = [tuple(variable.shape) for variable in variables]
    found = list(stand_ins.sources([gradient]))
    returned = [t for op in found if _is_loop(op, bodies) for t in op.outputs]
    waiting = [t for t in returned if t.dtype.is_floating and _shape(t) in shapes]
    known, marked = {id(op) for op in found}, {id(t) for t in waiting}
    while waiting:
        for op in waiting.pop().consumers():
            if id(op) not in known or _is_loop(op, bodies):
                continue
            used = [id(one) in marked for one in op.inputs]
            is_linear = (
                op.type in _LINEAR
                or (op.type in _BILINEAR and sum(used) == 1)
                or (op.type in _QUOTIENTS and used == [True, False])
            )
            if not is_linear:
                return str(op.type)
            new = [one for one in op.outputs if id(one) not in marked]
            marked.update(map(id, new))
            waiting += new
    return None


def _is_loop(op: tf.Operation, bodies: Collection[str]) -> bool:
    return op.type in _LOOPS and op.get_attr("body").name in bodies


def _shape(tensor: tf.Tensor) -> tuple[int | None, ...] | None:
    return None if tensor.shape.rank is None else tuple(tensor.shape)
