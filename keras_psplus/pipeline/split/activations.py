"""Activations that a stage keeps of a micro-batch for its backward pass.

TensorFlow's gradient functions use some of an operation's inputs and outputs; the others are freed.
The lists name the operations whose tensors are large.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from keras_psplus.pipeline.split import flops

_NEED_INPUTS = frozenset(
    "MatMul BatchMatMulV2 Conv2D Conv3D DepthwiseConv2dNative Einsum Mul RealDiv Square "
    "SquaredDifference Pow Log Abs Erf Sin Cos FusedBatchNormV3 MaxPool MaxPool3D Softplus "
    "Maximum Minimum SelectV2 LeakyRelu GatherV2 ResourceGather".split()
)
_NEED_OUTPUTS = frozenset(
    "Relu Relu6 Elu Selu Tanh Sigmoid Softmax LogSoftmax Exp Sqrt Rsqrt Reciprocal MaxPool "
    "MaxPool3D".split()
)


def kept(
    operations: Iterable[tf.Operation], of_batch: set[int]
) -> dict[int, tuple[tf.Tensor, int]]:
    """The tensors that the gradients of some operations need.

    Args:
        operations: Operations of a forward pass.
        of_batch: Ids of the tensors that are computed of the batch. Others, as weights, are there
            in any case.

    Returns:
        Dict from the ids of tensors to pairs of a tensor and its bytes.
    """
    found = {}
    for op in operations:
        if op.type in flops.LOOPS and any(id(tensor) in of_batch for tensor in op.outputs):
            inner = list(flops.body_of(op))
            every = {id(tensor) for one in inner for tensor in one.outputs}
            size = sum(size for _, size in kept(inner, every).values())
            found[id(op.outputs[0])] = op.outputs[0], flops.steps_of(op) * size
            continue
        tensors = [*op.inputs] if op.type in _NEED_INPUTS else []
        tensors += op.outputs if op.type in _NEED_OUTPUTS else []
        for tensor in tensors:
            if id(tensor) in of_batch:
                found[id(tensor)] = tensor, flops.size_of(tensor)
    return found
