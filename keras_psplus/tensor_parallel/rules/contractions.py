"""Layers that multiply by a cut kernel: Dense and EinsumDense.

A kernel is cut along an axis of its output (a column cut), along one that is summed over (a row
cut), or along one that input, kernel and output have in common, such as attention's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import backend, ops
from keras_psplus.tensor_parallel.group import ModelGroup
from keras_psplus.tensor_parallel.late_gathers import part_of
from keras_psplus.tensor_parallel.regions import Regions
from keras_psplus.tensor_parallel.variable import CutWeight, cut_of


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


def rule_for(layer: Any, group: ModelGroup, regions: Regions) -> Callable[..., Any] | None:
    """The `call` of a layer with a cut kernel; None if it has none.

    Args:
        group: The workers that share its kernel.
        regions: Regions in which tensors are local.
    """
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
