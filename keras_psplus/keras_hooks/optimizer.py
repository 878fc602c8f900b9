"""Optimizers: gradients are summed before they are clipped, and updates run beside variables.

Stock Keras clips each replica's own gradients and sums them afterwards, which no single process
would do. The order is written down in `core/gradient_path.py`.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_psplus.core import gradient_path
from keras_psplus.keras_hooks.hook import (
    Hook,
    of_applied,
    of_handed_over,
    of_optimizer,
    of_variables,
)
from keras_psplus.keras_internals.keras_parts import (
    base_optimizer,
    loss_scale_optimizer,
    tf_optimizer,
)

_BASE = base_optimizer.BaseOptimizer
_TF = tf_optimizer.TFOptimizer
_LOSS_SCALE = loss_scale_optimizer.LossScaleOptimizer
_APPLY: list[tuple[Any, Callable[[Any], Any]]] = [(_BASE, of_applied), (_LOSS_SCALE, of_applied)]
if hasattr(keras.optimizers, "MultiOptimizer"):
    # Handed over whole, it counts a step once. Not in all versions of Keras.
    _APPLY.append((keras.optimizers.MultiOptimizer, of_handed_over))

HOOKS = (
    Hook(
        _BASE,
        "build",
        ["self", "variables"],
        of_optimizer,
        gradient_path.build_optimizer,
        "the servers of a table learn which optimizer updates it",
        call="build_optimizer",
    ),
    Hook(
        _BASE,
        "exclude_from_weight_decay",
        ["self", "var_list", "var_names"],
        of_variables,
        "read",
        "it keeps the keys of variables, which those of a stage have once they are made",
        by=1,
    ),
    Hook(
        _TF,
        "add_variable_from_reference",
        ["self", "reference_variable", "name", "initializer"],
        of_optimizer,
        gradient_path.add_slot,
        "the slots of a table are on its servers, and those of a dynamic one grow with it",
        call="add_slot",
    ),
    *(
        Hook(
            owner,
            "apply",
            ["self", "grads", "trainable_variables"],
            find,
            "apply",
            "`updates=` says when to step; synchronous workers hand their gradients over",
        )
        for owner, find in _APPLY
    ),
    Hook(
        _TF,
        "_overwrite_model_variables_with_average_value",
        ["self", "trainable_variables"],
        of_optimizer,
        "write",
        "workers that share weights wait for each other once, and not for each of them",
        call="change_averages",
    ),
    Hook(
        _LOSS_SCALE,
        "check_finite",
        ["self", "grads"],
        of_optimizer,
        gradient_path.check_finite,
        "one replica's overflow must skip the step on all",
    ),
    Hook(
        _BASE,
        "_backend_apply_gradients",
        ["self", "grads", "trainable_variables"],
        of_optimizer,
        gradient_path.apply_gradients,
        "gradients are reduced before they are clipped; updates run beside their variables",
    ),
    Hook(
        _TF,
        "_backend_update_step",
        ["self", "grads", "trainable_variables", "learning_rate"],
        of_optimizer,
        gradient_path.update_variables,
        "gradients are reduced already; those of variables on servers are pushed there",
    ),
)
