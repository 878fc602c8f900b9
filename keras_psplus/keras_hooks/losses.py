"""Losses: the gradient of a replica's mean counts by its rows.

Stock Keras divides every loss by the number of replicas and sums gradients. That is right for
equal shares only, leaves users' own losses in `train_step` too large by that number, and shows
them in logs too small. Here losses stay what they are in one process, means over the replica's own
rows, and the tape takes their gradients times `local_rows / global_rows`: the sum over replicas is
then the gradient of the mean over the global batch.
"""

import tensorflow as tf

from keras_psplus.core.batch import losses
from keras_psplus.keras_hooks.hook import Hook, of_step
from keras_psplus.keras_internals.keras_parts import (
    loss_module,
    metrics,
    nn_module,
    numpy_module,
    reduction_metrics,
)

_OF_LOGITS = ["target", "output", "from_logits", "axis"]

HOOKS = (
    *(
        Hook(
            loss_module,
            name,
            ["value"],
            of_step,
            losses.scale,
            "a loss is not divided by the number of replicas: its gradient is scaled by rows",
        )
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    ),
    Hook(
        loss_module,
        "reduce_values",
        ["values", "sample_weight", "reduction"],
        of_step,
        losses.reduce_values,
        "sums are no means, and weighted means divide by the whole batch's weight",
    ),
    Hook(
        loss_module,
        "apply_mask",
        ["sample_weight", "mask", "dtype", "reduction"],
        of_step,
        losses.apply_mask,
        "masked means divide by the whole batch's number of entries",
    ),
    *(
        Hook(
            module,
            name,
            parameters,
            of_step,
            "layer",
            "workers have parts of the logits of a cut layer, and exchange a few numbers of a row",
        )
        for module, name, parameters in (
            (nn_module, "sparse_categorical_crossentropy", _OF_LOGITS),
            (nn_module, "categorical_crossentropy", _OF_LOGITS),
            (numpy_module, "argmax", ["x", "axis", "keepdims"]),
        )
    ),
    Hook(
        reduction_metrics.Mean,
        "update_state",
        ["self", "values", "sample_weight"],
        of_step,
        losses.update_mean,
        "a mean over a replica's rows counts by its rows",
    ),
    Hook(
        reduction_metrics.Sum,
        "update_state",
        ["self", "values", "sample_weight"],
        of_step,
        losses.update_sum,
        "a loss of the batch is added once, not once by each replica",
    ),
    Hook(
        metrics.Metric,
        "__getattribute__",
        ["self", "name"],
        of_step,
        losses.get_attribute,
        "in any metric's `update_state`, losses are numbers of the replica's own rows",
    ),
    Hook(
        tf.GradientTape,
        "gradient",
        ["self", "target", "sources", "output_gradients", "unconnected_gradients"],
        of_step,
        "gradient",
        "the gradient of a replica's mean counts by its rows",
    ),
)
