"""`fit` and `evaluate` under `ParameterServerStrategy`: steps go to the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_psplus.core.batch import batches
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.steps.model_steps import compiled_step
from keras_psplus.parameter_server.steps.runner import StepRunner
from keras_psplus.parameter_server.sync.sync_steps import SyncRunner
from keras_psplus.parameter_server.updates import worker_updates


def make(
    model: keras.Model, context: StepContext, step_function: Callable[..., Any], is_training: bool
) -> StepRunner:
    """A train or test function whose steps run on the workers."""
    compiled = compiled_step(context.engine, model, step_function)
    step = _knowing_rows(model._autoconvert_optionals(compiled))
    if is_training:
        step = context.updating.wrap(model, step)
    kind = SyncRunner if is_training and context.mode.is_sync else StepRunner
    return kind(context, model, step, is_training)


def _knowing_rows(step: Callable[..., Any]) -> Callable[..., Any]:
    def step_on(batch: Any) -> Any:
        with worker_updates.batch_rows.being(batches.rows_of(batch)):
            return step(batch)

    return step_on
