"""`ParameterServerStrategy(mode="sync")`: gradients are handed over; their sums are applied."""

import tensorflow as tf
from keras.src import ops
from keras.src.optimizers import base_optimizer, loss_scale_optimizer

from keras_psplus.all_reduce import batches
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.parameter_server import shares
from keras_psplus.parameter_server.sharded import Parts
from keras_psplus.parameter_server.sync_functions import is_applying


def install():
    """Installs this module's hooks."""
    for cls in (base_optimizer.BaseOptimizer, loss_scale_optimizer.LossScaleOptimizer):
        replace(cls, "apply", ["self", "grads", "trainable_variables"])(_apply)
    replace(base_optimizer.BaseOptimizer, "_clip_gradients", ["self", "grads"])(_clip)


def split(batch, num_workers):
    """Cuts a global batch into the workers' shares.

    Args:
        batch: Structure of tensors.
        num_workers: Number of workers.

    Returns:
        List of pairs of a share's part of the batch's rows and its batch; shares without rows are
        missing, unless none has any.
    """
    world = batches.World(rank=0, local_replicas=num_workers, replicas=num_workers)
    parts = batches.split(batch, world).replicas
    shares = [
        (int(part.local_rows) / int(part.global_rows), part.data)
        for part in parts
        if int(part.local_rows)
    ]
    return shares or [(1.0, batch)]


def _apply(original, self, grads, trainable_variables=None):
    share = shares.current()
    if share is None or not len(grads):
        return original(self, grads, trainable_variables)
    inner = getattr(self, "inner_optimizer", self)
    variables = inner._trainable_variables if trainable_variables is None else trainable_variables
    return share.hand_over(self, list(grads), list(variables))


def _clip(original, self, grads):
    """Clips the sums on their servers: elsewhere, each would cross the network twice more."""
    if not is_applying():
        return original(self, grads)
    by_norm = self.clipnorm and self.clipnorm > 0
    if not by_norm and self.global_clipnorm and self.global_clipnorm > 0:
        norm, limit = _norm(grads), self.global_clipnorm
        # As in Keras: NaN if the norm is not finite.
        factor = limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [_times(gradient, factor) for gradient in grads]
    return [
        _times(gradient, self.clipnorm / ops.maximum(_norm([gradient]), self.clipnorm))
        if by_norm and isinstance(gradient, Parts)
        else _beside(lambda g: original(self, [g])[0], gradient)
        for gradient in grads
    ]


def _norm(gradients):
    squares = []
    for gradient in gradients:
        for part in gradient if isinstance(gradient, Parts) else [gradient]:
            if part is not None:
                with tf.device(part.device):
                    squares.append(ops.cast(ops.sum(ops.square(part)), "float32"))
    return ops.sqrt(ops.sum(ops.stack(squares)))


def _times(gradient, factor):
    return _beside(lambda g: g * ops.cast(factor, g.dtype), gradient)


def _beside(function, gradient):
    """A function of a gradient, or of each of its parts, on the server that it is on."""
    if gradient is None:
        return None
    if isinstance(gradient, Parts):
        return Parts(_beside(function, part) for part in gradient)
    with tf.device(gradient.device):
        return function(gradient)
