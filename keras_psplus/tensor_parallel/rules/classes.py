"""Cross-entropy and argmax over classes, of whose logits each worker has a part.

As in Megatron-LM's vocabulary-parallel cross-entropy, workers exchange three numbers for each row:
the highest of their logits, the sum of their exponentials, and the logit of the target.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus.engine import Call
from keras_psplus.tensor_parallel.group import ModelGroup
from keras_psplus.tensor_parallel.late_gathers import LocalPart

# Indices of classes are exact in float32.
_MOST_CLASSES = 1 << 24
_DTYPES = (tf.float32, tf.bfloat16, tf.float16)


def cross_entropy(call: Call, group: ModelGroup) -> Any:
    """Cross-entropy of each row, without the other workers' logits.

    Args:
        call: The call of Keras's `categorical_crossentropy` or `sparse_categorical_crossentropy`.
        group: The workers that have the parts of the logits.
    """
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
    """Index of the highest logit of each row, without the other workers' logits.

    Args:
        call: The call of Keras's `argmax`, of logits or of their softmax.
        group: The workers that have the parts of the logits.
    """
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
    found, op = getattr(tensor, "_local_part", None), tensor.op
    if isinstance(found, LocalPart):
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
