"""`predict` under `ParameterServerStrategy`: steps on the workers, outputs in the data's order."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import tf_trainer, tree
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.scheduling.closures import Closure
from keras_psplus.parameter_server.steps.closure_totals import ClosureTotals, are_same
from keras_psplus.parameter_server.steps.model_steps import compiled_step, tensors, weights
from keras_psplus.parameter_server.steps.runner import describe
from keras_psplus.parameter_server.steps.step_functions import StepFunctions
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
        """Waits for the step and returns its output."""
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
