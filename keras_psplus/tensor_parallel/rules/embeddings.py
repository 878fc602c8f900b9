"""Embeddings whose table is cut by vocabulary or by width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import ops, set_keras_mask
from keras_psplus.tensor_parallel.group import ModelGroup
from keras_psplus.tensor_parallel.regions import Regions
from keras_psplus.tensor_parallel.rules.contractions import local_input, local_value
from keras_psplus.tensor_parallel.variable import cut_of

_REVERSIBLE: Any = getattr(keras.layers, "ReversibleEmbedding", None)


def rule_for(layer: Any, group: ModelGroup, regions: Regions) -> Callable[..., Any] | None:
    """The `call` of an embedding with a cut table; None if it has none.

    Args:
        group: The workers that share its table.
        regions: Regions in which tensors are local.
    """
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
