"""Attention by heads: each worker computes its own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import keras

from keras_psplus.tensor_parallel.regions import is_elementwise
from keras_psplus.tensor_parallel.rules.contractions import cut_kernel
from keras_psplus.tensor_parallel.variable import cut_of

_KINDS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_ARGUMENTS = ("return_attention_scores", "cache")


def is_by_heads(layer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an attention layer is to be computed by heads.

    Its kernels have to be cut along the axis of heads, and its `call` has to be Keras's or
    KerasHub's, which computes each head by itself. One that returns scores, or keeps keys in a
    cache, needs all heads.

    Args:
        args: Positional arguments of the call.
        kwargs: Its keyword arguments.
    """
    if not isinstance(layer, _KINDS) or not layer.built or not _is_known(layer):
        return False
    inner = [layer._query_dense, layer._key_dense, layer._value_dense]
    inner += [one for one in [getattr(layer, "_gate_dense", None)] if one is not None]
    kernels = [cut_kernel(one) for one in inner]
    # Kernels have (inputs, heads, size of a head), and (heads, size of a head, outputs).
    if not all(one is not None and one.cut.axis == one.cut.shape.rank - 2 for one in kernels):
        return False
    if not all(is_elementwise(one.activation) for one in inner):
        return False
    output = cut_kernel(layer._output_dense)
    if output is None or output.cut.axis != 0 or cut_of(layer._output_dense.bias) is not None:
        return False
    given = inspect.signature(type(layer).call).bind_partial(layer, *args, **kwargs).arguments
    asked = [given.get(name) for name in _ARGUMENTS]
    return asked[0] in (None, False) and asked[1] is None


def _is_known(layer: Any) -> bool:
    calls = {(kind.call, kind._compute_attention) for kind in _KINDS}
    hub = sys.modules.get("keras_hub")
    cached = getattr(getattr(hub, "layers", None), "CachedMultiHeadAttention", None)
    if cached is not None:
        calls.add((cached.call, _KINDS[0]._compute_attention))
    return (type(layer).call, type(layer)._compute_attention) in calls
