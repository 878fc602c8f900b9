"""What each layer of a model costs, read off its graph."""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.replica_step import ReplicaStep
from keras_psplus.keras_parts import get_keras_mask, models, tree

# Rows of the batch that is traced.
_ROWS = 32


@dataclasses.dataclass
class LayerCost:
    """One layer, in the order of the first calls.

    Attributes:
        layer: The layer.
        flops: Floating-point operations of its calls for one row, forward.
        tensors: List of pairs: bytes of a tensor that it returns, for one row; and the numbers
            of the layers that use the tensor.
    """

    layer: Any
    flops: float = 0.0
    tensors: list = dataclasses.field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Number of elements of the layer's variables."""
        return sum(int(np.prod(v.shape)) for v in self.layer.variables)

    @property
    def bytes(self) -> int:
        """Bytes of the layer's variables."""
        return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in self.layer.variables)


class _Recorder(ReplicaStep):
    """Context of a trace that notes which layer has made which operations."""

    has_batch_fraction = False

    def __init__(self, engine):
        super().__init__(engine)
        self._inside = False
        # Pairs of a layer and the operations of one of its calls.
        self.calls = []

    def call(self, original, layer, args, kwargs):
        if self._inside or not is_cut(layer):
            return original(layer, *args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        self._inside = True
        try:
            return original(layer, *args, **kwargs)
        finally:
            self._inside = False
            self.calls.append((layer, graph.get_operations()[before:]))


def is_cut(layer: keras.Layer) -> bool:
    """Whether a layer is a part of a stage as a whole: models are what is cut between layers."""
    return not isinstance(layer, models.Model)


def of_layers(engine: Any, model: keras.Model, spec: Any) -> tuple[list[LayerCost], bool]:
    """Costs of a model's layers.

    Args:
        engine: `PipelineEngine`.
        model: Keras model; what is not built yet is built.
        spec: Structure of what the model is called with: something with a shape and a dtype.

    Returns:
        List of `LayerCost`, in the order of the first calls, and whether outputs have masks.
    """
    recorder = _Recorder(engine)
    specs, masks = tree.map_structure(_with_rows, spec), []

    def trace(inputs):
        with recorder:
            training = {"training": False} if model._call_has_training_arg else {}
            outputs = model(inputs, **training)
        masks.extend(get_keras_mask(leaf) for leaf in tree.flatten(outputs))

    graph = tf.function(trace, autograph=False).get_concrete_function(specs).graph
    return _costs(graph, recorder.calls), any(mask is not None for mask in masks)


def _with_rows(leaf):
    if leaf is None:
        return None
    shape = tf.TensorShape(leaf.shape)
    return tf.TensorSpec([_ROWS, *shape[1:]] if shape.rank else shape, tf.as_dtype(leaf.dtype))


def _costs(graph, calls):
    costs, number_of, makers = [], {}, {}
    for layer, operations in calls:
        if id(layer) not in number_of:
            number_of[id(layer)] = len(costs)
            costs.append(LayerCost(layer))
        number = number_of[id(layer)]
        costs[number].flops += sum(_flops(op) for op in operations) / _ROWS
        makers.update({op: number for op in operations})
    users = {}
    for op in graph.get_operations():
        # What is between layers belongs to the last of those that it uses.
        own = [makers[tensor.op] for tensor in op.inputs if tensor.op in makers]
        number = makers.setdefault(op, max(own)) if own else makers.get(op)
        for tensor in op.inputs:
            maker = makers.get(tensor.op)
            if number is not None and maker is not None and maker != number:
                users.setdefault(id(tensor), (tensor, maker, set()))[2].add(number)
    for tensor, maker, numbers in users.values():
        costs[maker].tensors.append((_bytes(tensor) / _ROWS, sorted(numbers)))
    return costs


def _flops(op):
    sizes = [_elements(tensor) for tensor in op.outputs]
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
        return 2 * size * max(1, _elements(op.inputs[0]) * _elements(op.inputs[1]) // size) ** 0.5
    if op.type in ("While", "StatelessWhile"):
        body = op.graph._get_function(op.get_attr("body").name)
        steps = max((t.shape[0] or 1 for t in op.outputs if t.shape.rank), default=1)
        return steps * sum(_flops(inner) for inner in body.graph.get_operations()) if body else size
    return size if op.outputs and op.outputs[0].dtype.is_floating else 0


def _elements(tensor):
    if tensor.shape.rank is None:
        return 1
    return int(np.prod([size or 1 for size in tensor.shape]))


def _bytes(tensor):
    return _elements(tensor) * max(1, tensor.dtype.size)
