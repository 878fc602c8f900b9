"""Base engine of all strategies that distribute training."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core import gradient_path, models
from keras_psplus.core.base import checks
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.batch import losses
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.graph import compiled_calls
from keras_psplus.core.graph.compiled_calls import CompilationCount, CompiledCalls, CompiledFunction
from keras_psplus.core.strategy_engine import StrategyEngine
from keras_psplus.engine import Call, answers

if TYPE_CHECKING:
    import keras


class DistributedEngine(StrategyEngine):
    """Refuses what cannot work, scales losses by rows, and has updates settled in time."""

    is_distributed = True
    # Whether steps can run eagerly.
    can_run_eagerly = True
    # The class of functions that it compiles, and whether this process computes them.
    compiled_function, computes_here = CompiledFunction, False
    # Whether variables are copied to this process to be exported.
    exports_copies = False

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        self._builder = models.Builder(self.trace_step)
        self._ask_for_xla: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._compilations: weakref.WeakKeyDictionary[keras.Model, CompilationCount]
        self._compilations = weakref.WeakKeyDictionary()

    # The trainer.

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        """Context in which errors of lost tasks are this library's."""
        raise NotImplementedError

    @answers("compile")
    def _compile(self, call: Call) -> Any:
        model = call.owner
        arguments = call.arguments
        checks.check_compile_arguments(self.strategy, model, arguments, self.can_run_eagerly)
        jit_compile = arguments.get("jit_compile", "auto")
        # An optimizer given by name makes its variables here: also when compile() is called
        # outside.
        with self.strategy.scope(), warnings.catch_warnings():
            # Keras means whole models, of which parts are compiled here.
            warnings.filterwarnings("ignore", "Model doesn't support `jit_compile=True`")
            result = call.proceed()
        self.resolve_auto_jit(model, jit_compile)
        (self._ask_for_xla.add if jit_compile is True else self._ask_for_xla.discard)(model)
        return result

    def compiled_calls(self, model: keras.Model) -> CompiledCalls | None:
        """Compiler of the calls in a new function of a model; None without XLA."""
        is_asked_for = model in self._ask_for_xla
        if not (is_asked_for or model.jit_compile):
            return None
        if model not in self._compilations:
            self._compilations[model] = CompilationCount(model.name, self.computes_here)
        return CompiledCalls(
            model,
            is_asked_for,
            self.is_remote,
            self.compiled_function,
            self._compilations[model],
            self.is_cut,
        )

    def is_remote(self, layer: keras.Layer) -> bool:
        """Whether a call of a layer by itself talks to servers."""
        return False

    def is_cut(self, operation: Any) -> bool:
        """Whether XLA compiles layers inside of an operation by themselves."""
        return False

    def build(self, call: Call) -> None:
        iterator, data_batch = call.get("iterator"), call.get("data_batch")
        if iterator is not None:
            # Keras would draw a batch to see its shapes; a generator's batch would be lost by that.
            data_batch = symbolic_batch(iterator.batch_spec)
        step_name = "test_step" if self.evaluates else "train_step"
        with self.strategy.scope():
            self._builder.build(call.owner, step_name, data_batch)
        checks.check_variables(self.strategy, call.owner)

    def trace_step(self, model: keras.Model, step: Callable[..., Any], batch_spec: Any) -> None:
        """Traces a step that makes variables, and runs nothing of it."""
        step = model._autoconvert_optionals(step)
        models.trace(lambda batch: self.strategy.run(step, args=(batch,)), batch_spec)

    def run(self, call: Call) -> Any:
        if call.name == "compile":
            return super().run(call)
        with self.translate_errors():
            return super().run(call)

    @answers("evaluate", "test_on_batch", "predict", "predict_on_batch")
    def _evaluate(self, call: Call) -> Any:
        self.settle(call.owner)
        return super()._evaluate(call)

    @answers("steps_end", "test_steps_end")
    def _end_steps(self, event: Call) -> dict[str, Any]:
        # Keras asks for an epoch's metrics before validation and before callbacks see its end.
        if event.name == "steps_end":
            self.settle(event.owner)
            if self.strategy.updates is not None and self.strategy.updates.flush:
                for optimizer in optimizers_of(event.owner).values():
                    self.updating.finish(optimizer)
        if event.owner in self._compilations:
            self._compilations[event.owner].report()
        return super()._end_steps(event)

    def compiled_calls_here(self) -> CompiledCalls | None:
        """Compiler of calls in the step that this thread is tracing; None without XLA."""
        step, alone = current_step(), compiled_calls.current()
        if step is not None and step.compiled_calls is not None:
            of_step: CompiledCalls = step.compiled_calls
            return of_step
        return None if alone is None else alone[1]

    @answers("call_layer")
    def _call_layer(self, call: Call) -> Any:
        compiled, layer = self.compiled_calls_here(), call.owner
        if compiled is None or not compiled.takes(layer):
            return losses.call_layer(call.original, layer, *call.args, **call.kwargs)
        inside = functools.partial(losses.call_layer, call.original)
        return compiled.call(inside, layer, *call.args, **call.kwargs)

    @answers("run_graph")
    def _run_graph(self, call: Call) -> Any:
        compiled = self.compiled_calls_here()
        return call.proceed() if compiled is None else compiled.run_graph(call)

    def accumulate(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
        gradient_path.accumulate(self, optimizer, grads, variables)

    # Saving.

    def finish_steps(self) -> None:
        """Waits for the steps that are under way, before a model is written."""

    @answers("save", "save_weights")
    def _save(self, call: Call) -> Any:
        self.finish_steps()
        return models.save(self.strategy, call)

    @answers("export")
    def _export(self, call: Call) -> Any:
        self.finish_steps()
        export = models.export_copies if self.exports_copies else models.export
        return export(self.strategy, call)

    @answers("checkpoint")
    def _save_checkpoint(self, event: Call) -> Any:
        callback = event.owner
        self.settle(callback.model)
        folder = os.path.dirname(callback.filepath)
        if folder and "://" not in folder and "{" not in folder:
            # Keras makes it if it is not there, and fails where another worker was quicker.
            os.makedirs(folder, exist_ok=True)
        return event.proceed()


def symbolic_batch(spec: Any) -> Any:
    """A batch's type specification with what Keras's symbolic build asks of a batch.

    Returns:
        The same structure, with None for what has no dtype.
    """
    return tf.nest.map_structure(lambda leaf: leaf if hasattr(leaf, "dtype") else None, spec)
