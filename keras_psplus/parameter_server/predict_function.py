"""`predict` under `ParameterServerStrategy`: steps on the workers, outputs in the data's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.batch import batches
from keras_psplus.keras_internals.keras_parts import tf_trainer, tree
from keras_psplus.parameter_server import worker_updates
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.scheduling.queue import Closure
from keras_psplus.parameter_server.steps.logs import ClosureTotals, are_same
from keras_psplus.parameter_server.steps.runner import StepRunner, describe
from keras_psplus.parameter_server.steps.step_functions import (
    StepFunctions,
    compiled_step,
    tensors,
    weights,
)
from keras_psplus.parameter_server.sync.sync_steps import SyncRunner
from keras_psplus.parameter_server.tracing.worker_function import Trace
from keras_psplus.tf_internals import tensor_conversion_registry


class PredictFunction:
    """A predict function whose steps run on the workers; their outputs are waited for later."""

    def __init__(self, context: StepContext, model: keras.Model) -> None:
        compiled = compiled_step(context.engine, model, model.predict_step)
        step = model._autoconvert_optionals(compiled)
        self._functions = StepFunctions(context, step, _concatenated, lambda: weights(model))
        self._context, self._sent = context, 0
        self._totals: ClosureTotals | None = None
        context.functions.add(self)

    def __call__(self, batches: Any) -> Any:
        batches = [tensors(batch) for batch in batches]
        function, payload = self._functions(batches)
        if self._totals is None or not are_same(self._totals.variables, function.variables):
            self.drain()
            self._totals = ClosureTotals(function.variables)
        result = self._context.scheduler.submit(
            function.concrete,
            (tf.constant(self._totals.next), payload),
            lambda result, _: function.add_costs(result[0], self._context.totals),
            f"predict(), {describe(batches, self._sent)}",
        )
        self._sent += len(batches)
        self._totals.steps += len(batches)
        if self._totals.has_seeds and self._totals.draws is None:
            self._totals.note_draws(function.split(result.get()[0])[0], len(batches))
        outputs = function.concrete.structured_outputs[1]
        if any(not isinstance(output, tf.Tensor) for output in tf.nest.flatten(outputs)):
            return result.get()[1]
        places = tf.nest.pack_sequence_as(outputs, range(len(tf.nest.flatten(outputs))))
        return tree.map_structure(lambda place: _Awaited(result, place), places)

    def drain(self) -> None:
        """Leaves seeds where they would be after as many steps here."""
        if self._totals is not None and self._totals.has_seeds:
            self._totals.write()
        self._sent, self._totals = 0, None


def _concatenated(trace: Trace, outputs: list[Any]) -> tuple[tf.Tensor, Any, Any]:
    result = outputs[0]
    if len(outputs) > 1:
        result = tree.map_structure(lambda *parts: tf_trainer.concat(list(parts)), *outputs)
    return trace.changes(), result, ()


class _Awaited:
    """Lazy output of a predict step; readers see a tensor."""

    def __init__(self, result: Closure, place: int) -> None:
        self._result, self._place = result, place

    def _tensor(self) -> Any:
        return tf.nest.flatten(self._result.get()[1])[self._place]

    def numpy(self) -> Any:
        return self._tensor().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __getitem__(self, key: Any) -> Any:
        return self._tensor()[key]

    def __len__(self) -> int:
        return len(self._tensor())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor(), name)


tensor_conversion_registry.register_tensor_conversion_function(
    _Awaited, lambda value, dtype=None, name=None, as_ref=False: value._tensor()
)


# `fit` and `evaluate` under `ParameterServerStrategy`: steps go to the workers.


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
