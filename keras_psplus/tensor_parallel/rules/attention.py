"""Attention by heads: each worker computes its own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.tensor_parallel.regions import is_elementwise
from keras_psplus.tensor_parallel.rules.contractions import cut_kernel
from keras_psplus.tensor_parallel.variable import cut_of

_KINDS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_ARGUMENTS = ("return_attention_scores", "cache")
_GIVEN = ("query", "value", "key")


def by_heads(layer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tf.Tensor] | None:
    """Tensors that all heads attend from and to, or None for other calls.

    The layer's kernels have to be cut along the axis of heads, and its `call` has to be Keras's or
    KerasHub's, which computes each head by itself. One that returns scores, or keeps keys in a
    cache, needs all heads.

    Args:
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
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
