"""Costs of each layer of a model, computed from its graph."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.batch.replica_step import ReplicaStep
from keras_psplus.engine import Engine
from keras_psplus.keras_internals.keras_parts import get_keras_mask, models, stateless_scope, tree
from keras_psplus.pipeline.graph import layer_call
from keras_psplus.pipeline.split import activations, flops

# Rows of the batch that is traced.
_ROWS = 32


@dataclasses.dataclass
class LayerCost:
    """One layer, in the order of the first calls.

    Attributes:
        flops: Floating-point operations of its calls for one row, forward.
        tensors: List of pairs: bytes of a tensor that it returns, for one row; and the numbers
            of the layers that use the tensor.
        kept: Bytes of what its backward pass needs, for one row.
        calls: With what it was called: a list of `layer_call.LayerCall`, None for a call that
            cannot be repeated.
    """

    layer: Any
    flops: float = 0.0
    tensors: list[Any] = dataclasses.field(default_factory=list)
    kept: float = 0.0
    calls: list[Any] = dataclasses.field(default_factory=list)

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(v.shape)) for v in self.layer.variables)

    @property
    def bytes(self) -> int:
        """Bytes of the layer's variables."""
        return _bytes_of(self.layer.variables)

    @property
    def trainable_bytes(self) -> int:
        return _bytes_of(self.layer.trainable_variables)


class Recorder(ReplicaStep):
    """Context of a trace that notes which layer has made which operations.

    A step that is traced in it computes no gradients and updates nothing.

    Attributes:
        calls: List of a layer, the operations of one of its calls, and with what it was called.
        applied: List of pairs: an optimizer that the step has called, and its variables.
    """

    has_batch_fraction = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._inside = False
        self.calls: list[Any] = []
        self.applied: list[Any] = []
        # What was there before any layer was called is made of the batch alone.
        self._given: set[tf.Operation] | None = None

    def call(self, original: Callable[..., Any], layer: keras.Layer, args: Any, kwargs: Any) -> Any:
        if self._inside or not is_cut(layer) or _is_of_shapes(args, kwargs):
            return original(layer, *args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        if self._given is None:
            self._given = set(graph.get_operations())
        call = layer_call.record_call(args, kwargs, _ROWS, self._is_given)
        self._inside = True
        try:
            return original(layer, *args, **kwargs)
        finally:
            self._inside = False
            self.calls.append((layer, graph.get_operations()[before:], call))

    def _is_given(self, tensor: tf.Tensor) -> bool:
        # Eager tensors are the model's own, as the edges of a graph network are.
        return hasattr(tensor, "numpy") or tensor.op in (self._given or ())

    def gradient(self, sources: Any) -> Any:
        """Placeholders of gradients by some sources."""
        return tree.map_structure(lambda source: tf.zeros(source.shape, source.dtype), sources)


def is_cut(layer: keras.Layer) -> bool:
    """Whether a layer is placed on a stage whole; models are cut between layers."""
    return not isinstance(layer, models.Model)


class ModelCosts(NamedTuple):
    """Costs of a model's layers.

    Attributes:
        layers: List of `LayerCost`, in the order of the first calls.
        has_masks: Whether outputs have masks.
        applied: As in `Recorder`.
    """

    layers: list[LayerCost]
    has_masks: bool
    applied: list[Any]


def of_layers(
    engine: Engine, model: keras.Model, spec: Any, step: Callable[[Any], Any] | None = None
) -> ModelCosts:
    """Costs of a model's layers.

    Args:
        model: Keras model; what is not built yet is built.
        spec: Structure of what the model is called with: something with a shape and a dtype.
        step: A step of the model's own, called in its place with a batch that `spec` describes.
    """
    recorder = Recorder(engine)
    specs = tree.map_structure(_with_rows, spec)
    masks: list[tf.Tensor | None] = []

    def trace(inputs: Any) -> None:
        with recorder:
            if step is not None:
                engine.strategy.run(step, args=(inputs,))
                return
            training = {"training": False} if model._call_has_training_arg else {}
            outputs = model(inputs, **training)
        masks.extend(get_keras_mask(leaf) for leaf in tree.flatten(outputs))

    graph = tf.function(trace, autograph=False).get_concrete_function(specs).graph
    has_masks = any(mask is not None for mask in masks)
    return ModelCosts(_costs(graph, recorder.calls), has_masks, recorder.applied)


def _is_of_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether Keras calls a layer to infer its output shapes while building a model."""
    leaves = tree.flatten((args, kwargs))
    is_symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)
    return is_symbolic or stateless_scope.in_stateless_scope()


def _with_rows(leaf: Any) -> tf.TensorSpec | None:
    if leaf is None:
        return None
    shape = tf.TensorShape(leaf.shape)
    return tf.TensorSpec([_ROWS, *shape[1:]] if shape.rank else shape, tf.as_dtype(leaf.dtype))


def _costs(graph: tf.Graph, calls: Sequence[Any]) -> list[LayerCost]:
    costs: list[LayerCost] = []
    number_of, makers, kept = {}, {}, set()
    of_batch = _of_batch(graph)
    for layer, operations, call in calls:
        if id(layer) not in number_of:
            number_of[id(layer)] = len(costs)
            costs.append(LayerCost(layer))
        number = number_of[id(layer)]
        # First values of weights are drawn in this graph, but in no step.
        costs[number].flops += (
            sum(
                flops.flops_of(op)
                for op in operations
                if any(id(t) in of_batch for t in op.outputs)
            )
            / _ROWS
        )
        costs[number].calls.append(call)
        makers.update({op: number for op in operations})
        for key, (tensor, size) in activations.kept(operations, of_batch).items():
            # Two layers may need it; it is counted where it was made.
            if key not in kept:
                kept.add(key)
                costs[makers.get(tensor.op, number)].kept += size / _ROWS
    users: dict[int, tuple[tf.Tensor, int, set[int]]] = {}
    for op in graph.get_operations():
        # What is between layers belongs to the last of those that it uses.
        own = [makers[tensor.op] for tensor in op.inputs if tensor.op in makers]
        user = makers.setdefault(op, max(own)) if own else makers.get(op)
        for tensor in op.inputs:
            maker = makers.get(tensor.op)
            if user is not None and maker is not None and maker != user:
                users.setdefault(id(tensor), (tensor, maker, set()))[2].add(user)
    for tensor, maker, numbers in users.values():
        costs[maker].tensors.append((flops.size_of(tensor) / _ROWS, sorted(numbers)))
    return costs


def _of_batch(graph: tf.Graph) -> set[int]:
    """Ids of the tensors that depend on the batch.

    Others are computed from weights and constants alone.
    """
    captured = {id(inside) for _, inside in graph.captures}
    found = {id(tensor) for tensor in graph.inputs if id(tensor) not in captured}
    for op in graph.get_operations():
        if any(id(tensor) in found for tensor in op.inputs):
            found.update(id(tensor) for tensor in op.outputs)
    return found


def _bytes_of(variables: Iterable[keras.Variable]) -> int:
    return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables)


def sent_before(costs: Sequence[LayerCost], number: int) -> float:
    """Bytes per row sent to later stages if a stage begins with a layer."""
    return sum(
        size for cost in costs[:number] for size, users in cost.tensors if max(users) >= number
    )
