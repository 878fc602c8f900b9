"""The one interface between Keras and a strategy: what the strategy answers when Keras asks.

Each method stands for one function of Keras (or of TensorFlow, where Keras relies on it) and gets
that function as `original`, then its arguments. The answers here are Keras's own. A strategy that
distributes training has an attribute `engine`, an instance of a class with other answers;
`keras_psplus.keras_hooks` finds it and asks. What calls which method, and why, is listed by
`keras-psplus doctor --hooks`.

Example:

```python
class LoggingEngine(Engine):
    def train(self, original, model, *args, **kwargs):
        print(f"{model.name} trains on {self.strategy.num_replicas_in_sync} replicas")
        return original(model, *args, **kwargs)
```
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus import activation

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

Original = Callable[..., Any]


class Engine:
    """Answers as plain Keras does.

    Args:
        strategy: The strategy whose engine this is; None for what belongs to no strategy.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None = None) -> None:
        self._strategy = None if strategy is None else weakref.ref(strategy)
        if strategy is not None:
            activation.activate()

    @property
    def strategy(self) -> Any:
        """The strategy whose engine this is."""
        return None if self._strategy is None else self._strategy()

    # The trainer.

    def compile(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """`Model.compile`."""
        return original(model, *args, **kwargs)

    def compile_loaded(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Compiles a model with what its file says."""
        return original(*args, **kwargs)

    def build(
        self, original: Original, model: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> Any:
        """Makes the variables of a model, its metrics and optimizer, before the first step."""
        return original(model, iterator=iterator, data_batch=data_batch)

    def make_function(
        self, original: Original, model: keras.Model, step_function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function that takes one or several train or test steps on an iterator."""
        return original(model, step_function)

    def make_predict_function(
        self, original: Original, model: keras.Model, force: bool = False
    ) -> Any:
        """Sets `model.predict_function`."""
        return original(model, force)

    def train(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """`fit` and `train_on_batch`."""
        return original(model, *args, **kwargs)

    def evaluate(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """`evaluate` and `test_on_batch`."""
        return original(model, *args, **kwargs)

    def predict(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """`predict` and `predict_on_batch`."""
        return original(model, *args, **kwargs)

    def end_of_training_epoch(
        self, original: Original, model: keras.Model, logs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Returns the logs of an epoch; before validation, and before callbacks see its end."""
        return original(model, logs)

    def reduce_outputs(
        self, original: Original, values: Any, strategy: tf.distribute.Strategy, reduction: str
    ) -> Any:
        """Makes one value of what the replicas' steps have returned."""
        return original(values, strategy, reduction)

    # Data.

    def make_iterator(
        self,
        original: Original,
        iterator: Any,
        distribute_strategy: tf.distribute.Strategy | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The constructor of the iterator over epochs: what data a process reads."""
        return original(iterator, distribute_strategy, *args, **kwargs)

    def begin_iteration(self, original: Original, iterator: Any) -> Any:
        """The epoch iterator's `__iter__`, at the beginning of each epoch."""
        return original(iterator)

    def enumerate_steps(self, original: Original, iterator: Any) -> Iterator[Any]:
        """Yields the steps of one epoch."""
        return original(iterator)

    def warn_of_early_end(self, original: Original, iterator: Any) -> Any:
        """Called where data end before the steps that Keras expects."""
        return original(iterator)

    def drain(self, original: Original, iterator: Any) -> Any:
        """Called where Keras needs the results of all steps up to now."""
        return original(iterator)

    # Variables and layers.

    def make_variable(
        self, original: Original, variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> Any:
        """The constructor of a Keras variable."""
        return original(variable, *args, **kwargs)

    def initialize(self, original: Original, variable: keras.Variable, value: Any) -> Any:
        """Makes TensorFlow's variable of a value."""
        return original(variable, value)

    def initialize_with_initializer(
        self, original: Original, variable: keras.Variable, initializer: Any
    ) -> Any:
        """Makes TensorFlow's variable, of a value that an initializer draws."""
        return original(variable, initializer)

    def assign(self, original: Original, variable: keras.Variable, value: Any) -> Any:
        """Gives a variable a value."""
        return original(variable, value)

    def assign_add(self, original: Original, variable: keras.Variable, value: Any) -> Any:
        """Adds to a variable."""
        return original(variable, value)

    def assign_sub(self, original: Original, variable: keras.Variable, value: Any) -> Any:
        """Subtracts from a variable."""
        return original(variable, value)

    def read(self, original: Original, variable: keras.Variable) -> np.ndarray:
        """`variable.numpy()`."""
        return original(variable)

    def to_float(self, original: Original, variable: keras.Variable) -> float:
        """`float(variable)`."""
        return original(variable)

    def to_int(self, original: Original, variable: keras.Variable) -> int:
        """`int(variable)`."""
        return original(variable)

    def read_rows(
        self,
        original: Original,
        variable: keras.Variable,
        indices: tf.Tensor,
        name: str | None = None,
    ) -> tf.Tensor:
        """`variable.sparse_read`, which Keras's variables do not have: `AttributeError`."""
        return original(variable, indices, name)

    def take(self, original: Original, x: Any, indices: Any, axis: int | None = None) -> Any:
        """`keras.ops.take` of a variable."""
        return original(x, indices, axis)

    def add_weight(
        self, original: Original, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        """`Layer.add_weight`."""
        return original(layer, *args, **kwargs)

    def next_seed(
        self, original: Original, generator: keras.random.SeedGenerator, ordered: bool = True
    ) -> tf.Tensor:
        """The next seed of a generator, for what a layer draws in this replica's step."""
        return original(generator, ordered)

    # Losses and gradients, inside a replica's step.

    def scale_loss(self, original: Original, value: Any) -> Any:
        """Multiplies or divides a loss by the number of replicas, as Keras does."""
        return original(value)

    def reduce_loss(
        self,
        original: Original,
        values: Any,
        sample_weight: Any = None,
        reduction: str | None = "sum_over_batch_size",
    ) -> tf.Tensor:
        """Makes one number of a loss's values."""
        return original(values, sample_weight, reduction)

    def mask_loss(
        self, original: Original, sample_weight: Any, mask: Any, dtype: Any, reduction: str | None
    ) -> Any:
        """The weights of a loss's values, with its mask."""
        return original(sample_weight, mask, dtype, reduction)

    def update_mean(
        self, original: Original, metric: keras.metrics.Mean, values: Any, sample_weight: Any = None
    ) -> Any:
        """`keras.metrics.Mean.update_state`."""
        return original(metric, values, sample_weight)

    def update_sum(
        self, original: Original, metric: keras.metrics.Sum, values: Any, sample_weight: Any = None
    ) -> Any:
        """`keras.metrics.Sum.update_state`."""
        return original(metric, values, sample_weight)

    def metric_attribute(self, original: Original, metric: keras.metrics.Metric, name: str) -> Any:
        """An attribute of a metric, such as `update_state` or `result`."""
        return original(metric, name)

    def make_layer(self, original: Original, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        """The constructor of a layer."""
        return original(layer, *args, **kwargs)

    def call_layer(self, original: Original, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        """`Layer.__call__`, in a replica's step."""
        return original(layer, *args, **kwargs)

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
        """`tf.GradientTape.gradient`."""
        return original(tape, target, sources, output_gradients, *args, **kwargs)

    def all_reduce_in_step(
        self,
        original: Original,
        context: tf.distribute.ReplicaContext,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """`ReplicaContext.all_reduce`, by which layers ask all replicas."""
        return original(context, reduce_op, value, *args, **kwargs)

    def all_gather_in_step(
        self,
        original: Original,
        context: tf.distribute.ReplicaContext,
        value: Any,
        axis: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """`ReplicaContext.all_gather`."""
        return original(context, value, axis, *args, **kwargs)

    # Optimizers. The order in which one applies gradients is in `core.gradient_path`.

    def build_optimizer(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        variables: list[keras.Variable],
    ) -> Any:
        """Makes an optimizer's slots."""
        return original(optimizer, variables)

    def add_slot(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> keras.Variable:
        """Makes an optimizer's slot for a variable."""
        return original(optimizer, reference_variable, name, initializer)

    def apply(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices | None],
        trainable_variables: list[keras.Variable] | None = None,
    ) -> Any:
        """Takes the gradients of one batch; a loss scale's optimizer is asked first."""
        return original(optimizer, grads, trainable_variables)

    def check_finite(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices | None],
    ) -> tf.Tensor:
        """Whether a loss scale's gradients are finite."""
        return original(optimizer, grads)

    def apply_gradients(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        trainable_variables: list[keras.Variable],
    ) -> Any:
        """Applies unscaled gradients, none of them None, to built variables."""
        return original(optimizer, grads, trainable_variables)

    def update_variables(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        trainable_variables: list[keras.Variable],
        learning_rate: Any,
    ) -> Any:
        """Changes variables and slots; some optimizers change more of their own before."""
        return original(optimizer, grads, trainable_variables, learning_rate)

    # What `core.gradient_path` asks for, in its order.

    def accumulate(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        variables: list[keras.Variable],
    ) -> None:
        """Keras's `gradient_accumulation_steps`: adds gradients up, and updates now and then."""
        raise NotImplementedError

    def reduce(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        variables: list[keras.Variable],
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns the gradients of the global batch, of those of this replica."""
        return grads

    def clip(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        variables: list[keras.Variable],
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns gradients clipped as the optimizer's arguments say."""
        return optimizer._clip_gradients(grads)

    def decay(self, optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
        """Applies weight decay."""
        optimizer._apply_weight_decay(variables)

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        variables: list[keras.Variable],
    ) -> None:
        """Changes variables and slots by gradients, which are those of all replicas."""
        optimizer._backend_update_step(grads, variables, optimizer.learning_rate)

    def push(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[Any],
    ) -> list[tuple[Any, Any]]:
        """Sends gradients to where variables are; returns pairs that are still to be updated."""
        return list(zip(grads, variables))

    def average(
        self, optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
    ) -> None:
        """Updates the moving averages of weights."""
        optimizer._update_model_variables_moving_average(variables)

    # Callbacks.

    def set_callbacks_model(
        self, original: Original, callbacks: keras.callbacks.CallbackList, model: keras.Model
    ) -> Any:
        """Gives a list of callbacks its model."""
        return original(callbacks, model)

    def begin_training(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        """`on_train_begin` of a list of callbacks."""
        return original(callbacks, logs)

    def begin_epoch(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        epoch: int,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        """`on_epoch_begin` of a list of callbacks."""
        return original(callbacks, epoch, logs)

    def end_batch(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        batch: int,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        """`on_train_batch_end` of a list of callbacks."""
        return original(callbacks, batch, logs)

    def end_epoch(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        epoch: int,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        """`on_epoch_end` of a list of callbacks, after validation."""
        return original(callbacks, epoch, logs)

    def end_progress(
        self,
        original: Original,
        callback: keras.callbacks.ProgbarLogger,
        epoch: int,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        """The progress bar's `on_epoch_end`."""
        return original(callback, epoch, logs)

    def save_checkpoint(
        self,
        original: Original,
        callback: keras.callbacks.ModelCheckpoint,
        epoch: int,
        batch: int | None,
        logs: dict[str, Any] | None,
    ) -> Any:
        """`ModelCheckpoint` writes, if there is something to write."""
        return original(callback, epoch, batch, logs)

    def save_backup(self, original: Original, callback: keras.callbacks.BackupAndRestore) -> Any:
        """`BackupAndRestore` writes."""
        return original(callback)

    def restore_backup(
        self,
        original: Original,
        callback: keras.callbacks.BackupAndRestore,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        """`BackupAndRestore` reads, at the beginning of training."""
        return original(callback, logs)

    def end_backup(
        self,
        original: Original,
        callback: keras.callbacks.BackupAndRestore,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        """`BackupAndRestore` deletes, at the end of training."""
        return original(callback, logs)

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
        """`Model.save` and `Model.save_weights`."""
        return original(model, filepath, overwrite, *args, **kwargs)

    def export(
        self, original: Original, model: keras.Model, filepath: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """`Model.export`."""
        return original(model, filepath, *args, **kwargs)

    def has_memory_for_file(self, original: Original, model: keras.Model) -> bool:
        """Whether a model's file may be in memory while it is written or read."""
        return original(model)

    def attributes_to_skip(self, original: Original, obj_type: str) -> set[str]:
        """Names of the attributes of a kind of object that are not saved."""
        return original(obj_type)
