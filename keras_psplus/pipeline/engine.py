"""Engine of `PipelineStrategy`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.data import iterator_release
from keras_psplus.core.distributed_engine import DistributedEngine
from keras_psplus.core.models import model_saving
from keras_psplus.core.models.building import lifted
from keras_psplus.engine import Original
from keras_psplus.keras_internals.keras_parts import epoch_iterator
from keras_psplus.log import logger
from keras_psplus.pipeline import failure
from keras_psplus.pipeline.base import rows, schedule
from keras_psplus.pipeline.context import PipelineContext
from keras_psplus.pipeline.replicas.residuals import Residuals
from keras_psplus.pipeline.split import costs
from keras_psplus.pipeline.step import train_step
from keras_psplus.pipeline.step.pipedream import PipeDreamFunction
from keras_psplus.pipeline.step.step_function import PipelineTrainFunction, PredictFunction
from keras_psplus.pipeline.step.traced_step import PipelineStep, Update
from keras_psplus.tf_internals import context as tf_context


class PipelineEngine(DistributedEngine):
    """For a chief that traces steps over the devices of all stages."""

    can_run_eagerly = False

    def __init__(self, strategy: tf.distribute.Strategy, context: PipelineContext) -> None:
        super().__init__(strategy)
        self.context = context
        context.residuals.finish_steps = self.settle
        # The function that has begun training steps and not ended them, or None.
        self.under_way: PipeDreamFunction | None = None
        # Whether variables were given values since the last step began.
        self._has_written = False

    @property
    def worker_state(self) -> Residuals:
        return self.context.residuals

    # Steps that are under way.

    def settle(self, model: keras.Model | None = None) -> None:
        if self.under_way is not None:
            self.under_way.finish()

    def end_of_training_epoch(
        self, original: Original, model: keras.Model, logs: dict[str, Any] | None
    ) -> dict[str, Any]:
        if self.under_way is not None and not self._evaluates:
            logs = self.under_way.finish()
        return super().end_of_training_epoch(original, model, logs)

    def _settle_for(self, variable):
        """Ends the steps that may change a variable."""
        if self.under_way is not None and tf.executing_eagerly() and self.under_way.has(variable):
            self.settle()

    def finish_writes(self) -> None:
        """Waits until the workers have done what was written to their variables.

        To be called before a step. A chief sends eager operations and goes on, and nothing orders
        them before the parts of a function that runs on the same worker.
        """
        if self._has_written:
            self._has_written = False
            tf_context.context().sync_executors()

    def note_written(self) -> None:
        """Notes that variables were given values outside of steps."""
        self._has_written = True

    # The trainer.

    def translate_errors(self) -> AbstractContextManager[None]:
        return failure.translate_errors(self.strategy)

    def build(
        self, original: Original, model: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> None:
        spec = iterator.batch_spec if iterator is not None else data_batch
        batch_rows = getattr(iterator, "batch_rows", None)
        self.context.splitter.split(self, model, spec, trains=True, batch_rows=batch_rows)
        super().build(original, model, iterator, data_batch)

    def train(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        # What was read from a checkpoint of TensorFlow's, say, has gone past `assign`.
        self.context.copies.note_stale()
        self.note_written()
        return super().train(original, model, *args, **kwargs)

    def evaluate(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        self.context.copies.note_stale()
        self.note_written()
        return super().evaluate(original, model, *args, **kwargs)

    predict = evaluate

    def divides_train_step(self, model: keras.Model) -> bool:
        """Whether losses and gradients are computed micro-batch by micro-batch."""
        if self.strategy.schedule == "gpipe":
            return False
        reason = train_step.why_not_divided(model)
        if reason is None and self.context.splitter.has_masks(model):
            reason = "its outputs have masks, by whose number of entries the loss is divided"
        if reason is not None:
            text = (
                'the model \'%s\' is trained by schedule "gpipe" instead of "1f1b": %s. The '
                "results are those of one process; each stage keeps the activations of all "
                "micro-batches"
            )
            if self.strategy.schedule == schedule.PIPEDREAM:
                text = (
                    "for the model '%s', each stage keeps the activations of all micro-batches of "
                    "a batch: %s"
                )
            logger.info(text, model.name, reason)
        return reason is None

    def make_function(
        self, original: Original, model: keras.Model, step_function: Callable[..., Any]
    ) -> Any:
        self.settle()
        if self.strategy.schedule == schedule.PIPEDREAM and step_function == model.train_step:
            return PipeDreamFunction(self, model, self.divides_train_step(model))
        return PipelineTrainFunction(self, model, step_function)

    def make_predict_function(
        self, original: Original, model: keras.Model, force: bool = False
    ) -> Any:
        if model.predict_function is None or force:
            model.predict_function = PredictFunction(self, model)
        return model.predict_function

    def reduce_outputs(
        self, original: Original, values: Any, strategy: tf.distribute.Strategy, reduction: str
    ) -> Any:
        return values

    # Data.

    def make_iterator(
        self,
        original: Original,
        iterator: Any,
        distribute_strategy: tf.distribute.Strategy | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        epoch_iterator.EpochIterator.__init__(iterator, *args, **kwargs)
        iterator._distribute_strategy = distribute_strategy
        dataset = iterator.data_adapter.get_tf_dataset()
        iterator._distributed_dataset = iterator_release.Dataset(dataset)
        iterator.batch_spec = dataset.element_spec
        iterator.batch_rows = rows.rows_of_data(iterator.data_adapter, dataset)

    # Variables and layers.

    def make_layer(self, original: Original, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        self.context.stages.note_made(layer)
        return original(layer, *args, **kwargs)

    def make_variable(
        self, original: Original, variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> Any:
        super().make_variable(original, variable, *args, **kwargs)
        # As TensorFlow's variables have theirs: without the strategy, it cannot be read.
        variable._made_in = self.strategy
        variable._is_made_to_train = variable._trainable

    def initialize_with_initializer(
        self, original: Original, variable: keras.Variable, initializer: Any
    ) -> Any:
        self.context.variables.initialize(variable, initializer)

    def assign(self, original: Original, variable: keras.Variable, value: Any) -> Any:
        step = current_step()
        if isinstance(step, PipelineStep) and step.is_replaying:
            return value  # It was given that before.
        self.context.variables.ensure(variable)
        self._settle_for(variable)
        self.context.copies.note_changed(variable)
        if tf.executing_eagerly():
            self.note_written()
        return original(variable, value)

    def read(self, original: Original, variable: keras.Variable) -> Any:
        self.context.variables.ensure(variable)
        self._settle_for(variable)
        return original(variable)

    def next_seed(
        self, original: Original, generator: keras.random.SeedGenerator, ordered: bool = True
    ) -> tf.Tensor:
        draw, step = functools.partial(original, generator, ordered), current_step()
        return step.next_seed(draw) if isinstance(step, PipelineStep) else draw()

    def call_layer(self, original: Original, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        return current_step().call(original, layer, args, kwargs)

    # Gradients and optimizers: those of the whole batch, as in one process.

    def gradient(
        self,
        original: Original,
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        step = current_step()
        if isinstance(step, costs.Recorder):
            return step.gradient(sources)
        return original(tape, target, sources, output_gradients, *args, **kwargs)

    def apply(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices | None],
        trainable_variables: list[keras.Variable] | None = None,
    ) -> Any:
        step = current_step()
        if isinstance(step, costs.Recorder):
            known = optimizer._trainable_variables if optimizer.built else []
            step.applied.append((optimizer, list(trainable_variables or known)))
            return None
        if step is None or step.updates is None:
            return original(optimizer, grads, trainable_variables)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                'A loss scale changes between batches, and `schedule="pipedream"` computes two of '
                'them at the same time. Use the dtype policy "mixed_bfloat16", without one, or '
                f'`schedule="1f1b"`. Received: optimizer={optimizer.name}'
            )
        if trainable_variables is None:
            trainable_variables = optimizer._trainable_variables
        step.updates.append(Update(optimizer, list(grads), list(trainable_variables)))

    def build_optimizer(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> Any:
        # Keras looks variables up by what TensorFlow's are.
        for variable in variables:
            self.context.variables.ensure(variable)
        return super().build_optimizer(original, optimizer, variables)

    def add_slot(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> Any:
        variables = self.context.variables
        # In the replica's step, there is no scope to make a variable in.
        with lifted(self.strategy), variables.beside(reference_variable):
            slot = original(optimizer, reference_variable, name, initializer)
        variables.note_slot(slot, reference_variable)
        return slot

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
        self.settle()
        return super().save(original, model, filepath, overwrite, *args, **kwargs)

    def has_memory_for_file(self, original: Original, model: keras.Model) -> bool:
        # The chief need not have room for a model that is on all stages.
        return False

    def export(
        self, original: Original, model: keras.Model, filepath: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.settle()
        return model_saving.export_copies(self.strategy, original, model, filepath, *args, **kwargs)
