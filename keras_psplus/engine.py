"""The one interface between Keras and a strategy: calls of Keras, and what a strategy answers.

`keras_psplus.keras_hooks` makes a `Call` of each call of a replaced function, finds the engine of
the strategy that it belongs to, and asks one of the engine's methods. What calls which method, by
which name and why, is listed by `keras-psplus doctor --hooks`. A strategy that distributes training
has an attribute `engine`, an instance of a class that overrides some of these methods.

Example:

```python
class LoggingEngine(AllReduceEngine):
    def run(self, call):
        print(f"{call.name} on {self.strategy.num_replicas_in_sync} replicas")
        return super().run(call)

    def on(self, event):
        if event.name == "epoch_end":
            print("epoch", event.get("epoch"), event.get("logs"))
        return super().on(event)
```
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from keras_psplus import activation

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
    from keras.optimizers import Optimizer

    Gradients = list[tf.Tensor | tf.IndexedSlices]
    Variables = list[keras.Variable]

Method = TypeVar("Method", bound=Callable[..., Any])


class Call:
    """A call of a function of Keras or TensorFlow, which `proceed` makes.

    Args:
        original: The function.
        owner: Its first argument: a model, a layer, a variable, an optimizer, a list of callbacks.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
        name: Name of the call, by which engines tell calls apart.
        engine: The engine that is asked.
        parameters: Names of the first parameters after the owner.
    """

    __slots__ = ("args", "engine", "kwargs", "name", "original", "owner", "parameters")

    def __init__(
        self,
        original: Callable[..., Any],
        owner: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "",
        engine: Any = None,
        parameters: Sequence[str] = (),
    ) -> None:
        self.original, self.owner, self.args = original, owner, args
        self.kwargs = {} if kwargs is None else kwargs
        self.name, self.engine, self.parameters = name, engine, parameters

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its name; `default` if the caller has left it out.

        Args:
            name: Name of the parameter.
            default: The function's own default.
        """
        place = self.parameters.index(name) if name in self.parameters else len(self.args)
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def changed(self, **changed: Any) -> Call:
        """The same call with other arguments.

        Args:
            **changed: Arguments that take the place of the caller's.
        """
        args, kwargs = list(self.args), {**self.kwargs, **changed}
        for place, name in enumerate(self.parameters[: len(args)]):
            if name in changed:
                args[place] = kwargs.pop(name)
        others = self.name, self.engine, self.parameters
        return Call(self.original, self.owner, tuple(args), kwargs, *others)

    def proceed(self, **changed: Any) -> Any:
        """Calls the function and returns its result.

        Args:
            **changed: Arguments that take the place of the caller's.
        """
        call = self.changed(**changed) if changed else self
        return call.original(call.owner, *call.args, **call.kwargs)


def answers(*names: str) -> Callable[[Method], Method]:
    """Decorator of an engine's method that takes the calls of some names.

    A method of the same name in a subclass takes its place.

    Args:
        *names: Names of calls.
    """

    def mark(method):
        method.answers = names
        return method

    return mark


class Engine:
    """Answers as plain Keras does.

    A method that takes a call gives it to the engine's method that is decorated with
    `answers(name)`, by the call's name; without one, Keras's function answers. A subclass overrides
    the method, and calls `super()`'s for the names that it leaves alone.

    Args:
        strategy: The strategy whose engine this is; None for what belongs to no strategy.

    Attributes:
        is_distributed: Whether several replicas, or a chief and its workers, train together.
        evaluates: Whether `evaluate` or `predict` runs.
    """

    is_distributed = evaluates = False
    # Names of methods by names of calls.
    _answers: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._answers = dict(cls._answers)
        for method, value in vars(cls).items():
            cls._answers.update(dict.fromkeys(getattr(value, "answers", ()), method))

    def __init__(self, strategy: tf.distribute.Strategy | None = None) -> None:
        self._strategy = None if strategy is None else weakref.ref(strategy)
        if strategy is not None:
            activation.activate()

    @property
    def strategy(self) -> Any:
        """The strategy whose engine this is."""
        return None if self._strategy is None else self._strategy()

    def _answer(self, call: Call) -> Any:
        method = self._answers.get(call.name)
        return call.proceed() if method is None else getattr(self, method)(call)

    # Around what a script calls, and what it hears.

    def run(self, call: Call) -> Any:
        """Runs a method of a model.

        That is `compile`, `fit`, `train_on_batch`, `evaluate`, `test_on_batch`, `predict` or
        `predict_on_batch`.
        """
        return self._answer(call)

    def save(self, call: Call) -> Any:
        """Writes a model.

        `save`, `save_weights` and `export` are a model's methods; `has_memory_for_file` returns
        whether a whole file may be in memory while it is written or read.
        """
        return self._answer(call)

    def on(self, event: Call) -> Any:
        """Has callbacks hear of an event of `fit`, or do what they do to files.

        `set_model`, `train_begin`, `epoch_begin`, `batch_end`, `epoch_end` and `train_end` go to a
        list of callbacks. `steps_end` returns the logs of a model's epoch, before its validation
        and `epoch_end`; `test_steps_end` those of an evaluation. `checkpoint` is `ModelCheckpoint`
        writing; `backup`, `restore` and `end_backup` are what `BackupAndRestore` does.
        """
        return self._answer(event)

    # Before the first step.

    def build(self, call: Call) -> Any:
        """Makes the variables of a model, its metrics and optimizer."""
        return self._answer(call)

    def make_step(self, call: Call) -> Any:
        """Makes a function that takes steps.

        `make_function` returns one of an iterator, for training or evaluation;
        `make_predict_function` sets `model.predict_function`.
        """
        return self._answer(call)

    def data(self, call: Call) -> Any:
        """Chooses the data that this process reads.

        `make_iterator` is the constructor of the iterator over epochs; `drain` is called where
        Keras needs the results of all steps up to now.
        """
        return self._answer(call)

    # Variables and layers.

    def make_variable(self, call: Call) -> Any:
        """Makes variables.

        `make_variable` is the constructor of a Keras variable; `initialize` makes TensorFlow's of a
        value, `initialize_with_initializer` of what is drawn. `add_weight` makes one of a layer,
        `build_optimizer` all slots of an optimizer, and `add_slot` one.
        """
        return self._answer(call)

    def write(self, call: Call) -> Any:
        """Gives a variable a value: by `assign`, `assign_add` or `assign_sub`."""
        return self._answer(call)

    def read(self, call: Call) -> Any:
        """Reads a variable.

        `numpy` is of the whole, `take` (`keras.ops.take`) and `sparse_read` are of rows. Keras's
        variables have no `sparse_read`: its answer is AttributeError.
        """
        return self._answer(call)

    def layer(self, call: Call) -> Any:
        """Makes or calls a layer.

        `make_layer` is the constructor. In a replica's step, `call_layer` is `Layer.__call__`, and
        `next_seed` draws the next seed of a layer's generator.
        """
        return self._answer(call)

    def collective(self, call: Call) -> Any:
        """Makes one value of those of all replicas.

        `all_reduce` and `all_gather` are methods of a replica's context; `check_finite` returns
        whether a loss scale's gradients are finite; `reduce_outputs` takes what steps return.
        """
        return self._answer(call)

    # Gradients. The order in which the last seven are called is in `core.gradient_path`.

    def gradient(self, call: Call) -> Any:
        """Computes gradients in a replica's step: `tf.GradientTape.gradient`."""
        return self._answer(call)

    def apply(self, call: Call) -> Any:
        """Takes the gradients of one batch; a loss scale's optimizer is asked first."""
        return self._answer(call)

    def accumulate(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> None:
        """Adds gradients up over Keras's `gradient_accumulation_steps`, then updates."""
        raise NotImplementedError

    def reduce(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> Gradients:
        """Returns the gradients of the global batch, of those of this replica."""
        return grads

    def clip(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> Gradients:
        """Returns gradients clipped as the optimizer's arguments say."""
        return optimizer._clip_gradients(grads)

    def decay(self, optimizer: Optimizer, variables: Variables) -> None:
        """Applies weight decay."""
        optimizer._apply_weight_decay(variables)

    def update(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> None:
        """Changes variables and slots by gradients, which are those of all replicas."""
        optimizer._backend_update_step(grads, variables, optimizer.learning_rate)

    def push(
        self, optimizer: Optimizer, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        """Sends gradients to where variables are; returns pairs that are still to be updated."""
        return list(zip(grads, variables))

    def average(self, optimizer: Optimizer, variables: Variables) -> None:
        """Updates the moving averages of weights."""
        optimizer._update_model_variables_moving_average(variables)
