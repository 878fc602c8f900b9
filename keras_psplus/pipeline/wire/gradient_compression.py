"""Gradients in fewer bytes, on their way from one pipeline to the primaries in another.

A pipeline encodes the sum of its micro-batches' gradients, and the primary's worker decodes it and
adds it to its own sum, which goes nowhere and is left as it is.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_psplus.compression import Compressor, with_error_feedback
from keras_psplus.pipeline.base import needed
from keras_psplus.pipeline.replicas.pipeline_sums import ReplicaTransfer
from keras_psplus.pipeline.replicas.residuals import Residuals
from keras_psplus.pipeline.wire.traffic import Encoded
from keras_psplus.tf_internals import framework_ops as ops


class GradientCompression:
    """Compresses what crosses from pipeline to pipeline in one step, when it has been traced.

    To be made before the step is traced, as the step changes what it reads.

    Args:
        model: Keras model that is trained.
    """

    def __init__(self, compressor: Compressor, residuals: Residuals, model: keras.Model) -> None:
        self._compressor, self._residuals = with_error_feedback(compressor), residuals
        optimizer, self._scale = getattr(model, "optimizer", None), None
        self._step: tf.Tensor = tf.constant(0, tf.int64)
        if optimizer is not None and optimizer.built:
            self._step = tf.cast(optimizer.iterations.value, tf.int64)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.built:
            # Residuals are those of gradients without it, as it changes.
            self._scale = tf.identity(optimizer.dynamic_scale.value)

    def compress(
        self, graph: tf.Graph, crossings: list[ReplicaTransfer], results: Any
    ) -> list[Encoded]:
        """Encodes and decodes gradients.

        Args:
            results: What the step returns.

        Returns:
            List of what is sent in fewer bytes.
        """
        run, encoded = needed.operations(graph, results), []
        for crossing in crossings:
            arrived = tf.nest.flatten(crossing.arrived, expand_composites=True)
            # Of a model that gradients only pass through, nothing may be kept.
            if arrived[0].graph is not graph or not run.intersection(t.op for t in arrived):
                continue
            if isinstance(crossing.sent, tf.IndexedSlices):
                decoded, payload = self._rows(crossing)
            else:
                decoded, payload = self._whole(crossing)
            if decoded is not None:
                arrived[0].op._update_input(0, decoded)
                encoded.append(self._encoded(crossing, payload))
        return encoded

    def _encoded(self, crossing: ReplicaTransfer, payload: Any) -> Encoded:
        path, sent, payload = crossing.copied.path, [crossing.sent], tf.nest.flatten(payload)
        if isinstance(crossing.sent, tf.IndexedSlices):
            sent = [crossing.sent.values, crossing.sent.indices]
            payload.append(crossing.sent.indices)
        compressor = self._of(crossing)
        assert compressor is not None
        return Encoded(sent, payload, compressor, path)

    def _of(self, crossing: ReplicaTransfer) -> Compressor | None:
        weight = crossing.copied.variable()
        primary = crossing.copied.primary
        if self._compressor is None or weight is None:
            return None
        return self._compressor.for_variable(weight.path, primary.shape, primary.dtype)

    def _whole(self, crossing: ReplicaTransfer) -> tuple[tf.Tensor | None, Any]:
        compressor, sent = self._of(crossing), crossing.sent
        if compressor is None:
            return None, None
        shape, dtype = crossing.copied.primary.shape, sent.dtype
        device = crossing.copied.copies[crossing.pipeline].device
        state = self._residuals.of(
            crossing.copied, crossing.pipeline, device, lambda: compressor.init(shape, dtype)
        )
        with ops.device(device):
            values = tf.nest.map_structure(lambda one: one.read_value(), state)
            tensor = tf.ensure_shape(self._unscaled(sent), shape)
            payload, new = compressor.encode(tensor, values, self._step)
            for one, value in zip(tf.nest.flatten(state), tf.nest.flatten(new)):
                one.assign(value, read_value=False)
        with ops.device(crossing.copied.primary.device):
            decoded = self._scaled(compressor.decode(payload, shape, dtype, self._step))
        return decoded, payload

    def _rows(self, crossing: ReplicaTransfer) -> tuple[tf.Tensor | None, Any]:
        compressor, sent = self._of(crossing), crossing.sent.values
        if compressor is None or not compressor.compresses_rows:
            return None, None
        row_shape = crossing.copied.primary.shape[1:]
        with ops.device(crossing.copied.copies[crossing.pipeline].device):
            rows = tf.ensure_shape(sent, tf.TensorShape([None]).concatenate(row_shape))
            payload = compressor.encode_rows(rows, self._step)
        with ops.device(crossing.copied.primary.device):
            decoded = compressor.decode_rows(payload, row_shape, sent.dtype, self._step)
        return decoded, payload

    def _unscaled(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor if self._scale is None else tensor / tf.cast(self._scale, tensor.dtype)

    def _scaled(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor if self._scale is None else tensor * tf.cast(self._scale, tensor.dtype)
