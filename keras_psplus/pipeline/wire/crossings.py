"""Activations and their gradients in fewer bytes, on their way from stage to stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.compression import Compressor
from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.wire.traffic import Encoded
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
        compressor: Compressor of rows.
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
                payload, decoded[key] = _over(graph, tensor, consumer.device, compressor)
                encoded.append(Encoded([tensor], tf.nest.flatten(payload), compressor))
            for i, given in enumerate(consumer.inputs):
                if given is tensor:
                    consumer._update_input(i, decoded[key])
    return encoded


def _is_worth_it(tensor: tf.Tensor) -> bool:
    shape = tensor.shape
    if tensor.dtype != tf.float32 or not shape.rank:
        return False
    of_row = shape[1:].num_elements()
    # Compressors need to know the form of a row.
    return of_row is not None and of_row * (shape[0] or 1) >= _LEAST_ELEMENTS


def _over(
    graph: tf.Graph, tensor: tf.Tensor, device: str, compressor: Compressor
) -> tuple[Any, tf.Tensor]:
    step = tf.constant(0, tf.int64)
    with graph.as_default(), ops.control_dependencies(None):
        with ops.device(tensor.device):
            payload = compressor.encode_rows(tensor, step)
        with ops.device(device):
            return payload, compressor.decode_rows(payload, tensor.shape[1:], tensor.dtype, step)
