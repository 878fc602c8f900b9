"""Base engine of all strategies that distribute training."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core import gradient_path
from keras_psplus.core.base import checks
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.batch import losses
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.graph.compiled_calls import CompiledCalls
from keras_psplus.core.models import building, model_saving
from keras_psplus.core.strategy_engine import StrategyEngine
from keras_psplus.engine import Original
from keras_psplus.keras_internals.keras_parts import trainer

if TYPE_CHECKING:
    import keras


class DistributedEngine(StrategyEngine):
    """Refuses what cannot work, scales losses by rows, and has updates settled in time."""

    # Whether steps can run eagerly, and whether XLA can compile parts of them.
    can_run_eagerly, can_compile = True, False

    @property
    def compiles_by_default(self) -> bool:
        """Whether `jit_compile="auto"` has XLA compile them."""
        return False

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        # While metrics are those of an evaluation.
        self._evaluates = False
        self._builder = building.Builder(self.trace_step)
        self._ask_for_xla: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    # The trainer.

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        """Context in which errors of lost tasks are this library's."""
        raise NotImplementedError

    def compile(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
        checks.check_compile_arguments(
            self.strategy, model, arguments, self.can_run_eagerly, self.can_compile
        )
        jit_compile = arguments.get("jit_compile", "auto")
        # An optimizer given by name makes its variables here: also when compile() is called
        # outside.
        with self.strategy.scope():
            result = original(model, *args, **kwargs)
        if jit_compile == "auto":
            # Keras leaves models of a strategy uncompiled.
            model.jit_compile = self.compiles_by_default and trainer.model_supports_jit(model)
        (self._ask_for_xla.add if jit_compile is True else self._ask_for_xla.discard)(model)
        return result

    def compiled_calls(self, model: keras.Model) -> CompiledCalls | None:
        """Compiler of the calls in a new function of a model; None without XLA."""
        return CompiledCalls(model, model in self._ask_for_xla) if model.jit_compile else None

    def build(
        self, original: Original, model: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> None:
        if iterator is not None:
            # Keras would draw a batch to see its shapes; a generator's batch would be lost by that.
            data_batch = symbolic_batch(iterator.batch_spec)
        step_name = "test_step" if self._evaluates else "train_step"
        with self.strategy.scope():
            self._builder.build(model, step_name, data_batch)
        checks.check_variables(self.strategy, model)

    def trace_step(self, model: keras.Model, step: Callable[..., Any], batch_spec: Any) -> None:
        """Traces a step that makes variables, and runs nothing of it.

        Args:
            model: The model.
            step: Its `train_step` or `test_step`.
            batch_spec: Type specification of a batch.
        """
        step = model._autoconvert_optionals(step)
        building.trace(lambda batch: self.strategy.run(step, args=(batch,)), batch_spec)

    def train(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        with self.translate_errors():
            return super().train(original, model, *args, **kwargs)

    def evaluate(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        outer, self._evaluates = self._evaluates, True
        try:
            with self.translate_errors():
                self.settle(model)
                return original(model, *args, **kwargs)
        finally:
            self._evaluates = outer

    predict = evaluate

    def end_of_training_epoch(
        self, original: Original, model: keras.Model, logs: dict[str, Any] | None
    ) -> dict[str, Any]:
        # Keras asks for an epoch's metrics before validation and before callbacks see its end.
        if not self._evaluates:
            self.settle(model)
            if self.strategy.updates is not None and self.strategy.updates.flush:
                for optimizer in optimizers_of(model).values():
                    self.updating.finish(optimizer)
        return super().end_of_training_epoch(original, model, logs)

    # Losses and gradients.

    scale_loss = staticmethod(losses.scale)
    reduce_loss = staticmethod(losses.reduce_values)
    mask_loss = staticmethod(losses.apply_mask)
    update_mean = staticmethod(losses.update_mean)
    update_sum = staticmethod(losses.update_sum)
    metric_attribute = staticmethod(losses.call_metric)
    gradient = staticmethod(losses.gradient)

    def call_layer(self, original: Original, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        compiled = None if step is None else step.compiled_calls
        if compiled is None or not compiled.takes(layer):
            return losses.call_layer(original, layer, *args, **kwargs)
        inside = functools.partial(losses.call_layer, original)
        return compiled.call(inside, layer, *args, **kwargs)

    # Optimizers.

    apply_gradients = gradient_path.apply_gradients
    accumulate = gradient_path.accumulate
    update_variables = gradient_path.update_variables

    # Saving.

    def save(
        self,
        original: Original,
        model: keras.Model,
        filepath: Any,
        overwrite: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return model_saving.save(
            self.strategy, original, model, filepath, overwrite, *args, **kwargs
        )

    def export(
        self, original: Original, model: keras.Model, filepath: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return model_saving.export(self.strategy, original, model, filepath, *args, **kwargs)

    def save_checkpoint(
        self,
        original: Original,
        callback: keras.callbacks.ModelCheckpoint,
        epoch: int,
        batch: int | None,
        logs: dict[str, Any] | None,
    ) -> Any:
        self.settle(callback.model)
        folder = os.path.dirname(callback.filepath)
        if folder and "://" not in folder and "{" not in folder:
            # Keras makes it if it is not there, and fails where another worker was quicker.
            os.makedirs(folder, exist_ok=True)
        return original(callback, epoch, batch, logs)


def symbolic_batch(spec: Any) -> Any:
    """A batch's type specification with what Keras's symbolic build asks of a batch.

    Args:
        spec: Nested structure of `tf.TypeSpec`.

    Returns:
        The same structure, with None for what has no dtype.
    """
    return tf.nest.map_structure(lambda leaf: leaf if hasattr(leaf, "dtype") else None, spec)
