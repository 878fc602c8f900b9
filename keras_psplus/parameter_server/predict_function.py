"""`predict` under `ParameterServerStrategy`: steps on the workers, outputs in the data's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import tf_trainer, tree
from keras_psplus.parameter_server.steps.compiled_step import compiled_step
from keras_psplus.parameter_server.steps.runner import are_same, describe
from keras_psplus.parameter_server.steps.step_functions import StepFunctions
from keras_psplus.parameter_server.tracing.step_inputs import tensors, weights
from keras_psplus.parameter_server.tracing.worker_function import pack, unpack
from keras_psplus.tf_internals import tensor_conversion_registry

if TYPE_CHECKING:
    import keras

    from keras_psplus.parameter_server.context import StepContext
    from keras_psplus.parameter_server.scheduling.closures import Closure
    from keras_psplus.parameter_server.tracing.worker_function import ClosureVariable, Trace


def make(context: StepContext, model: keras.Model) -> _PredictFunction:
    """The predict function of a model: takes batches, and returns outputs that may be awaited."""

    def concatenated(trace: Trace, outputs: list[Any]) -> tuple[tf.Tensor, Any, Any]:
        result = outputs[0]
        if len(outputs) > 1:
            result = tree.map_structure(lambda *parts: tf_trainer.concat(list(parts)), *outputs)
        return trace.changes(), result, ()

    compiled = compiled_step(context.engine, model, model.predict_step)
    step = model._autoconvert_optionals(compiled)
    return _PredictFunction(
        context, StepFunctions(context, step, concatenated, lambda: weights(model))
    )


class _PredictFunction:
    """A predict function whose steps run on the workers; their outputs are waited for later."""

    def __init__(self, context: StepContext, functions: StepFunctions) -> None:
        self._context, self._functions = context, functions
        self._sent = 0
        self._seeds: _Seeds | None = None
        context.functions.add(self)

    def __call__(self, batches: Any) -> Any:
        batches = [tensors(batch) for batch in batches]
        function, payload = self._functions(batches)
        if self._seeds is None or not are_same(self._seeds.variables, function.variables):
            self.drain()
            self._seeds = _Seeds(function.variables)
        result = self._context.scheduler.submit(
            function.concrete,
            (tf.constant(self._seeds.values()), payload),
            lambda result, _: self._context.totals.add(
                function.costs, function.split(result[0])[1]
            ),
            f"predict(), {describe(batches, self._sent)}",
        )
        self._sent += len(batches)
        self._seeds.count(len(batches), lambda: function.split(result.get()[0])[0])
        outputs = function.concrete.structured_outputs[1]
        if any(not isinstance(output, tf.Tensor) for output in tf.nest.flatten(outputs)):
            return result.get()[1]
        places = tf.nest.pack_sequence_as(outputs, range(len(tf.nest.flatten(outputs))))
        return tree.map_structure(lambda place: _Awaited(result, place), places)

    def drain(self) -> None:
        """Leaves seeds where they would be after as many steps here."""
        if self._seeds is not None:
            self._seeds.write()
        self._sent, self._seeds = 0, None


class _Seeds:
    """Advances seeds from step to step, by as much as the first step does."""

    def __init__(self, variables: list[ClosureVariable]) -> None:
        self.variables = variables
        self._initial = pack(variables)
        self._move: Any = None
        self._steps = 0

    def values(self) -> Any:
        return self._initial if self._move is None else self._initial + self._move * self._steps

    def count(self, steps: int, changes: Callable[[], Any]) -> None:
        if self._move is None:
            has_seeds = any(variable.is_seed for variable in self.variables)
            self._move = changes() / steps if has_seeds else 0.0
        self._steps += steps

    def write(self) -> None:
        if self._move is not None and any(variable.is_seed for variable in self.variables):
            unpack(self.variables, self.values())


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
