"""Floating-point operations of an operation, by its shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf


def flops_of(op: tf.Operation) -> float:
    """Floating-point operations of an operation; a dimension that is not known counts as 1."""
    sizes = [elements(tensor) for tensor in op.outputs]
    size = max(sizes, default=0)
    if op.type in ("MatMul", "BatchMatMulV2"):
        inner = op.inputs[0].shape
        transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        width = None if inner.rank is None else inner[-2 if transposed else -1]
        return 2 * size * (width or 1)
    if op.type in ("Conv2D", "Conv3D", "DepthwiseConv2dNative"):
        kernel = op.inputs[1].shape.as_list()
        depth = 1 if op.type.startswith("Depthwise") else kernel[-2]
        return 2 * size * int(np.prod(kernel[:-2])) * depth
    if op.type == "Einsum":
        # Every index of both inputs once: more than a product whose indices are summed.
        return 2 * size * max(1, elements(op.inputs[0]) * elements(op.inputs[1]) // size) ** 0.5
    if op.type in LOOPS:
        operations = list(body_of(op))
        return steps_of(op) * sum(map(flops_of, operations)) if operations else size
    return size if op.outputs and op.outputs[0].dtype.is_floating else 0


LOOPS = ("While", "StatelessWhile")


def body_of(loop: tf.Operation) -> Iterator[tf.Operation]:
    """The operations of a loop's body, if it is known."""
    body = loop.graph._get_function(loop.get_attr("body").name)
    yield from body.graph.get_operations() if body else ()


def steps_of(loop: tf.Operation) -> int:
    """Estimated number of a loop's iterations.

    As a rule, a loop collects a row of a tensor in each of them.
    """
    return max((t.shape[0] or 1 for t in loop.outputs if t.shape.rank), default=1)


def elements(tensor: tf.Tensor) -> int:
    """Number of a tensor's elements; a dimension that is not known counts as 1."""
    if tensor.shape.rank is None:
        return 1
    return int(np.prod([size or 1 for size in tensor.shape]))


def size_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; a dimension that is not known counts as 1."""
    return elements(tensor) * max(1, tensor.dtype.size)
