"""Refuses, by name, what cannot work under a strategy with several replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import keras

from keras_psplus.arguments import shown
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import base_optimizer, tree
from keras_psplus.keras_internals.keras_parts import metrics as metrics_module

if TYPE_CHECKING:
    import tensorflow as tf

    from keras_psplus.updates import Updates


def check_has_updates(updates: Updates | None) -> None:
    """Raises ValueError if a strategy has no `updates`, None."""
    if updates is None:
        raise ValueError(
            "This needs a strategy that was made with `updates`, such as "
            "`updates=keras_psplus.updates.Accumulate(4)`. Received: updates=None"
        )


def check_compile_arguments(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    arguments: Mapping[str, Any],
    can_run_eagerly: bool,
) -> None:
    """Checks the arguments of `compile()`."""
    check_layers(strategy, model)
    if arguments.get("run_eagerly") and not can_run_eagerly:
        raise ValueError(
            f"`run_eagerly=True` is not supported by {type(strategy).__name__}: a worker runs "
            "traced functions only. To debug a step, train in one process. "
            "Received: run_eagerly=True"
        )
    optimizer = arguments.get("optimizer")
    while isinstance(optimizer, base_optimizer.BaseOptimizer):
        check_accumulation(getattr(strategy, "updates", None), optimizer)
        if optimizer._distribution_strategy is not strategy:
            refuse_optimizer(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    for name in ("metrics", "weighted_metrics"):
        for metric in tree.flatten(arguments.get(name)):
            if isinstance(metric, metrics_module.Metric):
                _check_in_scope(strategy, metric.variables, f"metric '{metric.name}'")


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what is no Keras optimizer."""
    if not isinstance(optimizer, base_optimizer.BaseOptimizer):
        raise ValueError(
            f"`optimizer` must be a Keras optimizer. Received: optimizer={shown(optimizer)}"
        )


def refuse_optimizer(optimizer: keras.optimizers.Optimizer) -> NoReturn:
    """Raises ValueError for an optimizer that was made outside the strategy's scope."""
    raise ValueError(
        f"The optimizer '{optimizer.name}' was made outside the strategy's scope: make it "
        "under `with strategy.scope():`, or pass its name to compile(). "
        f"Received: optimizer={optimizer}"
    )


def check_accumulation(updates: Updates | None, optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if an optimizer would accumulate what `updates` accumulates."""
    if getattr(updates, "steps", None) is not None and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"The optimizer '{optimizer.name}' accumulates gradients, and so does its "
            "strategy: give `gradient_accumulation_steps` or `updates=Accumulate(steps)`. "
            f"Received: gradient_accumulation_steps={optimizer.gradient_accumulation_steps}, "
            f"updates={updates!r}"
        )


def check_layers(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Raises ValueError if a layer needs what only one replica, or only all together, have."""
    parts = strategy.num_replicas_in_sync
    if not getattr(strategy, "_rows_are_shared", False):
        # All workers of parameter servers count as one replica.
        parts = max(parts, getattr(strategy, "num_workers", 1))
    # A pipeline with one micro-batch calls layers with other numbers of rows, too: to plan.
    in_stages = hasattr(strategy, "microbatches")
    among = "micro-batches" if in_stages else f"{parts} replicas"
    if parts == 1 and not in_stages:
        return
    parts_of_batch = getattr(strategy, "microbatches", 1) * getattr(strategy, "pipelines", 1)
    for layer in model._flatten_layers():
        if parts_of_batch > 1 and getattr(layer, "synchronized", False):
            raise ValueError(
                f"The layer '{layer.name}' asks for the statistics of all rows of a batch, which "
                "no micro-batch has: they go through its stage one after the other. Leave "
                "`synchronized=True` out, so that each takes its own, use GroupNormalization, or "
                "train under MultiWorkerMirroredStrategy. "
                f"Received: {layer.name}, synchronized=True, in {parts_of_batch} micro-batches"
            )
        if in_stages and isinstance(layer, keras.layers.TFSMLayer) and layer.trainable_weights:
            raise ValueError(
                f"The layer '{layer.name}' calls a function of a SavedModel, which goes on reading "
                "the variables that it was loaded with, and stages train copies of them. Set "
                "`layer.trainable = False`, or train it under another strategy. "
                f"Received: {layer.name}, a TFSMLayer with {len(layer.trainable_weights)} "
                "trainable weights"
            )
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"The layer '{layer.name}' is stateful: it goes on with the state of each row of "
                f"the batch before, and {type(strategy).__name__} deals the rows of a batch out "
                f"to {among}, not always in the same way. Use `stateful=False` and "
                "longer sequences, hand states on as inputs and outputs of the model "
                "(`initial_state`, `return_state=True`), or train it in one process "
                "(`keras_psplus.single_process()`). "
                f"Received: {layer.name}, stateful=True"
            )


def check_variables(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Raises ValueError if a variable of the model was made outside the strategy's scope."""
    # Also of layers that the model makes when it is built.
    check_layers(strategy, model)
    _check_in_scope(strategy, model.variables, f"model '{model.name}'")
    if model.optimizer is not None:
        owner = f"optimizer '{model.optimizer.name}'"
        _check_in_scope(strategy, model.optimizer.variables, owner)


def _check_in_scope(
    strategy: tf.distribute.Strategy, variables: Iterable[keras.Variable], owner: str
) -> None:
    for variable in variables:
        if not strategy.extended.has_made(variable._value):
            raise ValueError(
                f"The variable '{variable.path}' of the {owner} was made outside the strategy's "
                "scope, so every worker would change its own copy. Make every layer, metric and "
                "optimizer under `with strategy.scope():`. "
                f"Received: {variable.path}, shape={tuple(variable.shape)}"
            )


# Requested placement of the tables of KerasRS's `DistributedEmbedding`.

PARAMETER_SERVER, MIRRORED, AUTO = "parameter_server", "mirrored", "auto"
# KerasRS's name for a place that `HybridStrategy` calls otherwise.
_KERAS_RS_MIRRORED = "default_device"


class KerasRSPlacement:
    """Notes for each embedding where its table wants to lie, whatever the strategy will be."""

    def take_in(self, call: Call) -> None:
        """Checks the tables; KerasRS refuses the placement `"parameter_server"`."""
        configs = keras.tree.flatten(call.get("feature_configs"))
        tables = {id(c.table): c.table for c in configs if hasattr(c.table, "placement")}
        served = [t for t in tables.values() if t.placement == PARAMETER_SERVER]
        for table in served:
            table.placement = _KERAS_RS_MIRRORED
        try:
            call.proceed()
        finally:
            for table in served:
                table.placement = PARAMETER_SERVER

    def make_layers(self, call: Call) -> None:
        call.proceed()
        for path, config in call.get("feature_configs").items():
            wish = config.table.placement
            if wish != AUTO:
                embedding = call.owner._default_device_embedding_layers[path]
                embedding._keras_rs_placement = MIRRORED if wish == _KERAS_RS_MIRRORED else wish
