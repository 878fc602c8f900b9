"""Costs of each layer of a model, computed from its graph: operations, bytes and memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.batch.replica_step import ReplicaStep
from keras_psplus.engine import Engine
from keras_psplus.keras_internals.keras_parts import (
    get_keras_mask,
    loss_scale_optimizer,
    models,
    set_keras_mask,
    stateless_scope,
    tree,
)


class Times(NamedTuple):
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


# Size that a dimension which is not known counts as, but for the rows.
_UNKNOWN_SIZE = 64
_PLAIN = (type(None), bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class TensorForm:
    """The form of a tensor; a batch's own needs no gradient."""

    shape: tuple[int | None, ...]
    dtype: str
    has_mask: bool
    has_gradient: bool


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer, with a `TensorForm` in the place of each tensor."""

    args: Any
    kwargs: Any
    rows: int

    def make(self, rows: int, draw: Callable[..., tf.Tensor]) -> tuple[Any, Any, list[tf.Tensor]]:
        """Draws a call's arguments; returns them, and those whose gradients are needed."""
        sources = []

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, TensorForm):
                return leaf
            shape = self._shape(leaf.shape, rows)
            tensor = draw(shape, tf.as_dtype(leaf.dtype))
            if leaf.has_mask:
                # A mask has no entry for each feature.
                set_keras_mask(tensor, tf.fill(shape[:-1] if len(shape) > 2 else shape, True))
            if leaf.has_gradient and tensor.dtype.is_floating:
                sources.append(tensor)
            return tensor

        made = tree.map_structure(one, (self.args, self.kwargs))
        return *made, sources

    def _shape(self, shape: Iterable[int | None], rows: int) -> list[int]:
        sizes = [_UNKNOWN_SIZE if size is None else size for size in shape]
        if sizes and sizes[0] % self.rows == 0:
            sizes[0] = sizes[0] // self.rows * rows
        return sizes


def record_call(
    args: Any, kwargs: Any, rows: int, is_given: Callable[[Any], bool]
) -> LayerCall | None:
    """Notes a call; None if it was given more than dense tensors, numbers and texts."""
    leaves = tree.flatten((args, kwargs))
    if not all(isinstance(leaf, _PLAIN) or _has_form(leaf) for leaf in leaves):
        return None

    def form(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return leaf
        has_mask = get_keras_mask(leaf) is not None
        return TensorForm(tuple(leaf.shape), leaf.dtype.name, has_mask, not is_given(leaf))

    return LayerCall(tree.map_structure(form, args), tree.map_structure(form, kwargs), rows)


def _has_form(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None


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
    body = loop.graph._get_function(loop.get_attr("body").name)
    yield from body.graph.get_operations() if body else ()


def steps_of(loop: tf.Operation) -> int:
    """Estimated iterations of a loop, which as a rule collects a row in each."""
    return max((t.shape[0] or 1 for t in loop.outputs if t.shape.rank), default=1)


def elements(tensor: tf.Tensor) -> int:
    """Number of a tensor's elements; a dimension that is not known counts as 1."""
    if tensor.shape.rank is None:
        return 1
    return int(np.prod([size or 1 for size in tensor.shape]))


def size_of(tensor: tf.Tensor) -> int:
    return elements(tensor) * max(1, tensor.dtype.size)


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
    """Tensors, by their ids, that the gradients of some operations need, and their bytes.

    What is not computed `of_batch`, as weights, is there in any case.
    """
    found = {}
    for op in operations:
        if op.type in LOOPS and any(id(tensor) in of_batch for tensor in op.outputs):
            inner = list(body_of(op))
            every = {id(tensor) for one in inner for tensor in one.outputs}
            size = sum(size for _, size in kept(inner, every).values())
            found[id(op.outputs[0])] = op.outputs[0], steps_of(op) * size
            continue
        tensors = [*op.inputs] if op.type in _NEED_INPUTS else []
        tensors += op.outputs if op.type in _NEED_OUTPUTS else []
        for tensor in tensors:
            if id(tensor) in of_batch:
                found[id(tensor)] = tensor, size_of(tensor)
    return found


# Rows of the batch that is traced.
_ROWS = 32


@dataclasses.dataclass
class LayerCost:
    """One layer, in the order of the first calls.

    `flops`, forward, and the bytes `kept` for the backward pass are for one row, as those of the
    `tensors` that it returns, beside the numbers of the layers that use each. `calls` has None for
    one that cannot be repeated.
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
        return _bytes_of(self.layer.variables)

    @property
    def trainable_bytes(self) -> int:
        return _bytes_of(self.layer.trainable_variables)


class Recorder(ReplicaStep):
    """Context of a trace that notes which layer has made which operations.

    A step that is traced in it computes no gradients and updates nothing. `applied` has pairs of an
    optimizer that the step has called and its variables.
    """

    has_batch_fraction = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._inside = False
        self.calls: list[Any] = []
        self.applied: list[Any] = []
        # Operations from before the first layer's call depend on the batch alone.
        self._given: set[tf.Operation] | None = None

    def call(self, original: Callable[..., Any], layer: keras.Layer, args: Any, kwargs: Any) -> Any:
        if self._inside or not is_cut(layer) or _is_of_shapes(args, kwargs):
            return original(layer, *args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        if self._given is None:
            self._given = set(graph.get_operations())
        call = record_call(args, kwargs, _ROWS, self._is_given)
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
        return tree.map_structure(lambda source: tf.zeros(source.shape, source.dtype), sources)


def is_cut(layer: keras.Layer) -> bool:
    """Whether a layer is placed on a stage whole; models are cut between layers."""
    return not isinstance(layer, models.Model)


class ModelCosts(NamedTuple):
    layers: list[LayerCost]
    has_masks: bool
    applied: list[Any]


def of_layers(
    engine: Engine, model: keras.Model, spec: Any, step: Callable[[Any], Any] | None = None
) -> ModelCosts:
    """Costs of a model's layers, called by `spec` or a step of its own."""
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
    number_of, makers, counted = {}, {}, set()
    of_batch = _of_batch(graph)
    for layer, operations, call in calls:
        if id(layer) not in number_of:
            number_of[id(layer)] = len(costs)
            costs.append(LayerCost(layer))
        number = number_of[id(layer)]
        # First values of weights are drawn in this graph, but in no step.
        costs[number].flops += (
            sum(flops_of(op) for op in operations if any(id(t) in of_batch for t in op.outputs))
            / _ROWS
        )
        costs[number].calls.append(call)
        makers.update({op: number for op in operations})
        for key, (tensor, size) in kept(operations, of_batch).items():
            # Two layers may need it; it is counted where it was made.
            if key not in counted:
                counted.add(key)
                costs[makers.get(tensor.op, number)].kept += size / _ROWS
    users: dict[int, tuple[tf.Tensor, int, set[int]]] = {}
    for op in graph.get_operations():
        # An operation between layers belongs to the last of those that it uses.
        own = [makers[tensor.op] for tensor in op.inputs if tensor.op in makers]
        user = makers.setdefault(op, max(own)) if own else makers.get(op)
        for tensor in op.inputs:
            maker = makers.get(tensor.op)
            if user is not None and maker is not None and maker != user:
                users.setdefault(id(tensor), (tensor, maker, set()))[2].add(user)
    for tensor, maker, numbers in users.values():
        costs[maker].tensors.append((size_of(tensor) / _ROWS, sorted(numbers)))
    return costs


def _of_batch(graph: tf.Graph) -> set[int]:
    """Ids of tensors that depend on the batch, not on weights and constants alone."""
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


# Slots for each trainable variable, momentum apart; others have as many as Adam, or are taken to.
_SLOTS = {"Adafactor": 0, "Adagrad": 1, "Lion": 1, "Muon": 1, "RMSprop": 1, "SGD": 0}
_SLOTS_OF_ADAM = 2


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a stage."""

    weights: float = 0.0
    gradients: float = 0.0
    slots: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.slots + self.activations


def memory_of_stage(
    costs: Sequence[LayerCost], rows: float, slots: int | None, received: float
) -> Memory:
    """Memory of a stage of some layers, with `slots` if they are trained.

    Activations of so many `rows` are kept at once; `received` bytes a row come from other stages.
    """
    weights = sum(cost.bytes for cost in costs)
    if slots is None:
        return Memory(weights)
    trainable = sum(cost.trainable_bytes for cost in costs)
    kept = (received + sum(cost.kept for cost in costs)) * rows
    return Memory(weights, trainable, slots * trainable, kept)


class MemoryOfParts:
    """Memory of contiguous parts of a model's layers, each in constant time."""

    def __init__(
        self, costs: Sequence[LayerCost], rows: Sequence[float], slots: int | None
    ) -> None:
        self._rows = rows
        alone = [memory_of_stage([cost], 0, slots, 0).total for cost in costs]
        kept = [0.0 if slots is None else cost.kept for cost in costs]
        self._fixed, self._kept = _sums(alone), _sums(kept)
        # For each first layer, the bytes for a row that come from before it, by their first users.
        self._received = [_sums(one) for one in self._received_by(costs, slots is not None)]

    def __call__(self, stage: int, first: int, end: int) -> float:
        kept = self._kept[end] - self._kept[first]
        received = self._received[first][end] - self._received[first][first]
        return self._fixed[end] - self._fixed[first] + self._rows[stage] * (kept + received)

    def _received_by(self, costs: Sequence[LayerCost], trains: bool) -> Iterator[list[float]]:
        for first in range(len(costs)):
            received = [0.0] * len(costs)
            for cost in costs[:first] if trains else ():
                for size, users in cost.tensors:
                    later = [user for user in users if user >= first]
                    if later:
                        received[min(later)] += size
            yield received


def _sums(numbers: Iterable[float]) -> list[float]:
    return [0.0, *itertools.accumulate(numbers)]


def slots_of(optimizer: Any) -> int | None:
    """Number of an optimizer's slots per variable, by its class and options."""
    if optimizer is None:
        return None
    if isinstance(optimizer, loss_scale_optimizer.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    count = next((_SLOTS[name] for name in names if name in _SLOTS), _SLOTS_OF_ADAM)
    options = ("momentum", "amsgrad", "centered", "use_ema", "gradient_accumulation_steps")
    return count + sum(bool(getattr(optimizer, option, None)) for option in options)
