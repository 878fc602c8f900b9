"""Rules of layers whose weights are cut."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import backend, ops, set_keras_mask
from keras_psplus.tensor_parallel.group import (
    ModelGroup,
    Regions,
    is_elementwise,
    local_part_of,
    part_of,
)
from keras_psplus.tensor_parallel.variable import CutWeight, cut_of

# Layers that multiply by a cut kernel: Dense and EinsumDense.
#
# A kernel is cut along an axis of its output (a column cut), along one that is summed over (a row
# cut), or along one that input, kernel and output have in common, such as attention's heads.


class _Axes(NamedTuple):
    """Places of a kernel's cut axis in input and output; None where it is not."""

    input: int | None
    output: int | None


def cut_kernel(layer: Any) -> CutWeight | None:
    """The cut kernel of a Dense or EinsumDense layer whose `call` is Keras's; otherwise None."""
    for kind in (keras.layers.Dense, keras.layers.EinsumDense):
        if isinstance(layer, kind) and layer.built:
            is_keras = type(layer).call is kind.call and type(layer).kernel is kind.kernel
            changed = layer.lora_enabled or getattr(layer, "quantization_mode", None)
            return cut_of(layer._kernel) if is_keras and not changed else None
    return None


def contraction_rule_for(
    layer: Any, group: ModelGroup, regions: Regions
) -> Callable[..., Any] | None:
    """The `call` of a layer with a cut kernel; None if it has none."""
    kernel = cut_kernel(layer)
    if kernel is None:
        return None
    if isinstance(layer, keras.layers.Dense):
        compute, axes = ops.matmul, _Axes(*((-1, None), (None, -1))[kernel.cut.axis])
    else:

        def compute(inputs: tf.Tensor, part: tf.Tensor) -> Any:
            return ops.einsum(layer.equation, inputs, part)

        axes = _axes_of(layer.equation, kernel.cut.axis)
    contraction = _Contraction(layer, layer._kernel, compute, axes, group, regions)
    return contraction


def _axes_of(equation: str, kernel_axis: int) -> _Axes:
    """Places of a kernel's axis in the input and the output, counted from their ends."""
    operands, output = equation.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    label = kernel[kernel_axis]
    found = [side.index(label) - len(side) if label in side else None for side in (inputs, output)]
    for side, place in zip((inputs, output), found):
        if place is not None and "..." in side[side.index(label) :]:
            # Counted from the front: what comes after is of unknown rank.
            found[(inputs, output).index(side)] = side.index(label)
    return _Axes(*found)


class _Contraction:
    """The `call` of a layer that multiplies its input by a cut kernel."""

    def __init__(
        self,
        layer: Any,
        kernel: keras.Variable,
        compute: Callable[[tf.Tensor, tf.Tensor], Any],
        axes: _Axes,
        group: ModelGroup,
        regions: Regions,
    ) -> None:
        self._layer, self._kernel, self._compute = layer, kernel, compute
        self._axes, self._group, self._regions = axes, group, regions

    def __call__(self, inputs: Any, training: Any = None) -> Any:
        layer, group, axes = self._layer, self._group, self._axes
        part = local_value(self._kernel)
        if axes.input is None:
            inputs = self._regions.enter(inputs, group)
        else:
            inputs = local_input(inputs, axes.input, group, self._regions, part, self._kernel)
        outputs = self._compute(inputs, part)
        if axes.output is None:
            return outputs if self._regions.are_local else sum_of(layer, outputs, group)
        if layer.bias is not None:
            bias = local_bias(layer.bias, axes.output, outputs.shape.rank, group)
            outputs = ops.add(outputs, bias)
        return self._regions.finish(outputs, axes.output, layer.activation, group)


def sum_of(layer: Any, partial: tf.Tensor, group: ModelGroup) -> Any:
    """Output of a layer of which each worker has a summand."""
    outputs = group.sum(partial)
    if layer.bias is not None:
        with backend.AutocastScope(outputs.dtype.name):
            outputs = ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


def local_value(variable: keras.Variable) -> tf.Tensor:
    """This worker's part of a cut variable, in the type that its layer computes with."""
    cut = cut_of(variable)
    assert cut is not None
    value: tf.Tensor = variable._maybe_autocast(cut.local())
    return value


def local_input(
    inputs: tf.Tensor,
    axis: int,
    group: ModelGroup,
    regions: Regions,
    part: tf.Tensor,
    kernel: keras.Variable,
) -> tf.Tensor:
    """This worker's part of an input, along an axis that a kernel is cut along."""
    cut = cut_of(kernel)
    assert cut is not None
    if regions.are_local and inputs.shape[axis] == part.shape[cut.cut.axis]:
        return inputs
    found = part_of(inputs, axis)
    return group.split(inputs, axis) if found is None else found


def local_bias(
    bias: keras.Variable, axis: int, rank: int, group: ModelGroup
) -> tf.Tensor | keras.Variable:
    """This worker's part of a bias that is added to outputs cut along an axis."""
    axis = axis % rank - (rank - len(bias.shape))
    if axis < 0 or bias.shape[axis] == 1:
        return bias
    cut = cut_of(bias)
    if cut is not None and cut.cut.axis == axis:
        return local_value(bias)
    return group.split(tf.convert_to_tensor(bias), axis)


# Attention by heads: each worker computes its own.


_KINDS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_ARGUMENTS = ("return_attention_scores", "cache")
_GIVEN = ("query", "value", "key")


def by_heads(layer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tf.Tensor] | None:
    """Tensors that all heads attend from and to, or None for other calls.

    The layer's kernels have to be cut along the axis of heads, and its `call` has to be Keras's or
    KerasHub's, which computes each head by itself. One that returns scores, or keeps keys in a
    cache, needs all heads.
    """
    if not isinstance(layer, _KINDS) or not layer.built or not _is_known(layer):
        return None
    inner = _inner(layer)
    kernels = [cut_kernel(one) for one in inner]
    # Kernels have (inputs, heads, size of a head), and (heads, size of a head, outputs).
    if not all(one is not None and one.cut.axis == one.cut.shape.rank - 2 for one in kernels):
        return None
    if not all(is_elementwise(one.activation) for one in inner):
        return None
    last = layer._output_dense
    output = cut_kernel(last)
    if output is None or output.cut.axis != 0 or cut_of(last.bias) is not None:
        return None
    if layer.activity_regularizer is not None or last.activity_regularizer is not None:
        return None
    given = inspect.signature(type(layer).call).bind_partial(layer, *args, **kwargs).arguments
    asked = [given.get(name) for name in _ARGUMENTS]
    tensors = [one for one in map(given.get, _GIVEN) if one is not None]
    if asked[0] not in (None, False) or asked[1] is not None:
        return None
    return tensors if all(isinstance(one, tf.Tensor) for one in tensors) else None


def is_local(layer: Any) -> bool:
    """Whether heads sum no gradients, as those of whole biases are."""
    return all(one.bias is None or cut_of(one.bias) is not None for one in _inner(layer))


def _inner(layer: Any) -> list[Any]:
    inner = [layer._query_dense, layer._key_dense, layer._value_dense]
    return inner + [one for one in [getattr(layer, "_gate_dense", None)] if one is not None]


def _is_known(layer: Any) -> bool:
    calls = {(kind.call, kind._compute_attention) for kind in _KINDS}
    hub = sys.modules.get("keras_hub")
    cached = getattr(getattr(hub, "layers", None), "CachedMultiHeadAttention", None)
    if cached is not None:
        calls.add((cached.call, _KINDS[0]._compute_attention))
    return (type(layer).call, type(layer)._compute_attention) in calls


# Cross-entropy and argmax over classes, of whose logits each worker has a part.
#
# As in Megatron-LM's vocabulary-parallel cross-entropy, workers exchange three numbers for each
# row: the highest of their logits, the sum of their exponentials, and the logit of the target.


# Indices of classes are exact in float32.
_MOST_CLASSES = 1 << 24
_DTYPES = (tf.float32, tf.bfloat16, tf.float16)


def cross_entropy(call: Call, group: ModelGroup) -> Any:
    """Cross-entropy of each row, without the other workers' logits."""
    output, from_logits = call.get("output"), call.get("from_logits", False)
    logits = output if from_logits else _logits_of(output)
    local = _part(logits, call.get("axis", -1), is_loss=True)
    if local is None:
        return call.proceed()
    is_sparse = call.name.startswith("sparse")
    target, classes = tf.convert_to_tensor(call.owner), local.shape[-1] * group.size
    shape = local.shape[:-1] if is_sparse else local.shape[:-1] + [classes]
    if is_sparse and target.shape.rank == local.shape.rank and target.shape[-1] == 1:
        target = tf.squeeze(target, -1)
    if target.shape.rank is None or not target.shape.is_compatible_with(shape):
        return call.proceed()
    if is_sparse:
        # A label that no worker has fails, as in one process.
        place, is_mine = group.own_indices(tf.cast(target, tf.int64), local.shape[-1])
        found = tf.gather(local, place, axis=-1, batch_dims=local.shape.rank - 1)
        own, weight = tf.where(is_mine, found, tf.zeros([], local.dtype)), None
    else:
        target = tf.cast(target, local.dtype)
        own, weight = tf.reduce_sum(group.split(target, -1) * local, -1), tf.reduce_sum(target, -1)
    # No logit of a part may be finite.
    top = tf.stop_gradient(tf.maximum(tf.reduce_max(local, -1), local.dtype.min))
    total = tf.reduce_sum(tf.exp(local - top[..., tf.newaxis]), -1)
    numbers = group.collect(tf.stack([top, total, own], -1), -1)
    tops, totals, owns = (numbers[..., i::3] for i in range(3))
    tops = tf.stop_gradient(tops)
    highest = tf.reduce_max(tops, -1)
    total = tf.reduce_sum(totals * tf.exp(tops - highest[..., tf.newaxis]), -1)
    of_all = tf.math.log(total) + highest
    return (of_all if weight is None else weight * of_all) - tf.reduce_sum(owns, -1)


def argmax(call: Call, group: ModelGroup) -> Any:
    """Index of the highest logit of each row, without the other workers' logits."""
    logits = _logits_of(call.owner)
    local = _part(call.owner if logits is None else logits, call.get("axis"))
    if local is None or call.get("keepdims", False) or local.dtype not in _DTYPES:
        return call.proceed()
    width, rank = local.shape[-1], local.shape.rank
    if width * group.size > _MOST_CLASSES:
        return call.proceed()
    best = call.original(local, axis=-1) + group.place * width
    pair = [tf.cast(one, tf.float32) for one in (tf.reduce_max(local, -1), best)]
    pairs = group.gather(tf.stack(pair, -1), -1)
    place = call.original(pairs[..., 0::2], axis=-1)
    found = tf.gather(pairs[..., 1::2], place, axis=-1, batch_dims=rank - 1)
    return tf.cast(found, best.dtype)


def _logits_of(output: Any) -> Any:
    """Logits whose softmax this is; None if it is none."""
    is_softmax = _is_in_graph(output) and output.op.type == "Softmax"
    return output.op.inputs[0] if is_softmax else None


def _part(logits: Any, axis: int | None, is_loss: bool = False) -> tf.Tensor | None:
    """This worker's part of logits that are cut along their last axis, or None."""
    if not _is_in_graph(logits) or logits.shape.rank is None:
        return None
    last = logits.shape.rank - 1
    part = _local(logits, last, is_loss) if axis in (-1, last) else None
    return None if part is None or part.shape[-1] is None else part


def _local(tensor: tf.Tensor, axis: int, is_loss: bool) -> tf.Tensor | None:
    """The part of a tensor, also of what a loss makes of it at first."""
    found, op = local_part_of(tensor), tensor.op
    if found is not None:
        if found.axis != axis:
            return None
        found.has_loss |= is_loss
        return found.tensor
    if op.type == "Identity":
        return _local(op.inputs[0], axis, is_loss)
    if op.type == "Cast":
        part = _local(op.inputs[0], axis, is_loss)
        return None if part is None else tf.cast(part, tensor.dtype)
    if op.type == "SelectV2":
        # Rows of classes that are ignored become zeros.
        condition, chosen, other = op.inputs
        if other.shape.rank != 0 or condition.shape.rank is None or condition.shape[-1] != 1:
            return None
        part = _local(chosen, axis, is_loss)
        return None if part is None else tf.where(condition, part, other)
    return None


def _is_in_graph(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and not isinstance(tensor, tf.__internal__.EagerTensor)


# Embeddings whose table is cut by vocabulary or by width.


_REVERSIBLE: Any = getattr(keras.layers, "ReversibleEmbedding", None)


def embedding_rule_for(
    layer: Any, group: ModelGroup, regions: Regions
) -> Callable[..., Any] | None:
    """The `call` of an embedding with a cut table; None if it has none."""
    if not isinstance(layer, keras.layers.Embedding) or not layer.built:
        return None
    is_reversible = _REVERSIBLE is not None and isinstance(layer, _REVERSIBLE)
    known = _REVERSIBLE.call if is_reversible else keras.layers.Embedding.call
    changed = layer.lora_enabled or getattr(layer, "quantization_mode", None)
    if type(layer).call is not known or changed or cut_of(layer._embeddings) is None:
        return None
    return _Lookup(layer, is_reversible, group, regions)


class _Lookup:
    """The `call` of an embedding with a cut table."""

    def __init__(
        self, layer: Any, is_reversible: bool, group: ModelGroup, regions: Regions
    ) -> None:
        self._layer, self._is_reversible = layer, is_reversible
        self._group, self._regions = group, regions

    def __call__(self, inputs: Any, reverse: bool = False) -> Any:
        if reverse:
            return self._logits(inputs)
        layer = self._layer
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self(inputs.flat_values))
        if isinstance(inputs, tf.SparseTensor):
            # Keras looks up what is there as one sum for each place.
            return type(layer).call(layer, inputs)
        indices = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        outputs = self._rows(indices)
        mask = keras.layers.Embedding.compute_mask(layer, inputs) if self._is_reversible else None
        if mask is not None:
            set_keras_mask(outputs, mask)
        return outputs

    def _rows(self, indices: tf.Tensor) -> tf.Tensor:
        variable, group = self._layer._embeddings, self._group
        cut, dtype = cut_of(variable), self._layer.compute_dtype
        assert cut is not None
        indices = tf.where(indices < 0, indices + variable.shape[0], indices)
        if cut.cut.axis == 1:
            return group.stack(tf.cast(cut.local_rows(indices), dtype), -1)
        # The lookup of an index that nobody has fails, as in one process.
        place, is_mine = group.own_indices(indices, cut.local_shape[0])
        found = cut.local_rows(place)
        found = tf.where(is_mine[..., tf.newaxis], tf.cast(found, dtype), tf.zeros([], dtype))
        return group.sum(found)

    def _logits(self, inputs: Any) -> Any:
        layer, group = self._layer, self._group
        tied = layer.tie_weights
        variable = layer._embeddings if tied else layer.reverse_embeddings
        cut = cut_of(variable)
        # Of a tied table, the first axis is that of the outputs.
        is_column = cut is not None and (cut.cut.axis == 0) == tied
        part = tf.convert_to_tensor(variable) if cut is None else local_value(variable)
        if cut is not None and not is_column:
            inputs = local_input(inputs, -1, group, self._regions, part, variable)
        elif cut is not None:
            inputs = group.enter(inputs)
        kernel = tf.transpose(part) if tied else part
        if layer.reverse_dtype is not None:
            inputs, kernel = (ops.cast(one, layer.reverse_dtype) for one in (inputs, kernel))
        logits = ops.matmul(inputs, kernel)
        if cut is not None and not is_column:
            logits = group.sum(logits)
        if layer.logit_soft_cap is not None:
            logits = ops.tanh(logits / layer.logit_soft_cap) * layer.logit_soft_cap
        return group.stack(logits, -1) if is_column else logits
