"""Tensors in fewer bytes: those that cross stages, and gradients between pipelines."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from keras_psplus.compression import Compressor
from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.replicas import ReplicaTransfer
from keras_psplus.pipeline.traffic import Encoded
from keras_psplus.tf_internals import framework_ops as ops

# Shorter rows are sent as they are: their message costs more than their bytes.
_LEAST_ELEMENTS = 1024


def compress_activations(
    graph: tf.Graph,
    activations: Iterable[tf.Tensor],
    between: Iterable[tf.Operation],
    stages: Stages,
    compressor: Compressor,
) -> list[Encoded]:
    """Compresses activations between stages: encoded by the sender, decoded by the receiver.

    Each row is encoded by itself, so that a row's results do not depend on the others.

    Args:
        graph: The graph of a step, all of whose operations have devices.
        activations: Outputs of layers, and gradients of their inputs.
        between: The operations that belong to no layer. Tensors that they compute from activations
            count as activations.
    """
    sent = {id(tensor): tensor for tensor in activations}
    for op in between:
        if any(id(tensor) in sent for tensor in op.inputs):
            sent.update((id(tensor), tensor) for tensor in op.outputs)
    decoded: dict[tuple[int, str], tf.Tensor] = {}
    encoded = []
    for tensor in sent.values():
        pipeline = stages.pipeline_of(tensor.device)
        if not _is_worth_it(tensor) or pipeline is None:
            continue
        for consumer in tensor.consumers():
            # What joins the outputs of pipelines gets them as they are.
            if consumer.device == tensor.device or stages.pipeline_of(consumer.device) != pipeline:
                continue
            key = id(tensor), consumer.device
            if key not in decoded:
                ends = tensor.device, consumer.device
                payload, decoded[key] = _over(graph, tensor, ends, compressor)
                encoded.append(Encoded([tensor], payload, compressor))
            for i, given in enumerate(consumer.inputs):
                if given is tensor:
                    consumer._update_input(i, decoded[key])
    return encoded


def compress_gradients(
    graph: tf.Graph,
    transfers: Iterable[ReplicaTransfer],
    compressor: Compressor,
    scale: tf.Tensor | None,
) -> list[Encoded]:
    """Compresses gradients between pipelines, of which a primary's worker decodes each.

    The sum of the pipeline that has the primary goes nowhere, and is left as it is.

    Args:
        compressor: A `Cast`, or a `ByVariable` of these.
        scale: Result of `loss_scale`; gradients are sent without it.
    """
    encoded = []
    for transfer in transfers:
        weight, primary = transfer.copied.variable(), transfer.copied.primary
        arrived, sent = transfer.arrived, transfer.sent
        beside = []
        if isinstance(sent, tf.IndexedSlices):
            beside, sent, arrived = [sent.indices], sent.values, arrived.values
        own = None
        if weight is not None and arrived.graph is graph and primary.shape.rank:
            own = compressor.for_variable(weight.path, primary.shape, primary.dtype)
        if own is None:
            continue
        ends = transfer.copied.copies[transfer.pipeline].device, primary.device
        shape = tf.TensorShape([None if beside else primary.shape[0], *primary.shape[1:]])
        with ops.device(ends[0]):
            rows = tf.ensure_shape(sent, shape)
            rows = rows if scale is None else rows / tf.cast(scale, rows.dtype)
        payload, decoded = _over(graph, rows, ends, own)
        with ops.device(ends[1]):
            decoded = decoded if scale is None else decoded * tf.cast(scale, rows.dtype)
        arrived.op._update_input(0, decoded)
        encoded.append(Encoded([sent, *beside], [*payload, *beside], own, weight.path))
    return encoded


def loss_scale(model: keras.Model) -> tf.Tensor | None:
    """Scale of a step's losses, read before the step changes it; None without one."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not optimizer.built:
        return None
    return tf.identity(optimizer.dynamic_scale.value)


def _is_worth_it(tensor: tf.Tensor) -> bool:
    shape = tensor.shape
    if tensor.dtype != tf.float32 or not shape.rank:
        return False
    of_row = shape[1:].num_elements()
    # Compressors need to know the form of a row.
    return of_row is not None and of_row * (shape[0] or 1) >= _LEAST_ELEMENTS


def _over(
    graph: tf.Graph, tensor: tf.Tensor, ends: tuple[str, str], compressor: Compressor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Payload that leaves the first of two devices, and the tensor on the second."""
    step = tf.constant(0, tf.int64)
    with graph.as_default(), ops.control_dependencies(None):
        with ops.device(ends[0]):
            payload = compressor.encode_rows(tensor, step)
        with ops.device(ends[1]):
            decoded = compressor.decode_rows(payload, tensor.shape[1:], tensor.dtype, step)
    return tf.nest.flatten(payload), decoded
