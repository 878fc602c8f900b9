"""Interface between Keras and a strategy: calls of Keras, and what an engine answers.

`keras_psplus.keras_hooks` makes a `Call` of each call of a replaced function, finds the engine of
the strategy that it belongs to, and asks one of the engine's methods. What calls which method, by
which name and why, is listed by `keras-psplus doctor --hooks`. A strategy that distributes training
has an attribute `engine`, an instance of a class that overrides some of these methods.

Example:

```python
class LoggingEngine(AllReduceEngine):
    def on(self, event):
        if event.name == "epoch_end":
            print("epoch", event.get("epoch"), event.get("logs"))
        return super().on(event)
```
"""

from __future__ import annotations

import dataclasses
import inspect
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
    Pairs = list[tuple[Any, Any]]

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A call of a function of Keras or TensorFlow, which `proceed` makes.

    Attributes:
        original: The function.
        owner: Its first argument: a model, a layer, a variable, an optimizer, a list of callbacks.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
        name: Name of the call, by which engines tell calls apart.
        engine: The engine that is asked; by default one that answers as plain Keras does.
        parameters: Names of the parameters after the owner, in their order.
    """

    original: Callable[..., Any]
    owner: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    engine: Engine = dataclasses.field(default_factory=lambda: Engine())
    parameters: Sequence[str] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its name.

        Args:
            name: Name of the parameter.
            default: Value if the caller has left it out.
        """
        place = self.parameters.index(name) if name in self.parameters else len(self.args)
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments that the caller has given, by their names."""
        signature = inspect.signature(self.original)
        return dict(signature.bind(self.owner, *self.args, **self.kwargs).arguments)

    def changed(self, **arguments: Any) -> Call:
        """The same call with other arguments, by their names."""
        args, kwargs = list(self.args), {**self.kwargs, **arguments}
        for place, name in enumerate(self.parameters[: len(args)]):
            if name in arguments:
                args[place] = kwargs.pop(name)
        return dataclasses.replace(self, args=tuple(args), kwargs=kwargs)

    def proceed(self, **arguments: Any) -> Any:
        """Calls the function, with other arguments if some are given; returns its result."""
        call = self.changed(**arguments) if arguments else self
        return call.original(call.owner, *call.args, **call.kwargs)


def answers(*names: str) -> Callable[[Method], Method]:
    """Decorator of an engine's method that answers the calls of some names.

    A subclass's method of the same name takes its place.
    """

    def mark(method: Method) -> Method:
        vars(method)["answers"] = names
        return method

    return mark


class Engine:
    """Answers as plain Keras does.

    A method that takes a call has the method answer that is decorated with `answers(call.name)`, or
    Keras's function. A subclass overrides either; `super()` has the answer to names that it leaves.

    Args:
        strategy: The strategy whose engine this is; None for what belongs to no strategy.

    Attributes:
        is_distributed: Whether several replicas, or a chief and its workers, train together.
        evaluates: Whether `evaluate` or `predict` runs.
        hands_over: Whether steps hand gradients over to those who apply them later.
    """

    is_distributed = evaluates = hands_over = False
    # Names of methods by names of calls.
    _answers: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._answers = {}
        for base in reversed(cls.__mro__):
            for method, value in vars(base).items():
                cls._answers.update(dict.fromkeys(getattr(value, "answers", ()), method))

    def __init__(self, strategy: tf.distribute.Strategy | None = None) -> None:
        self._strategy = None if strategy is None else weakref.ref(strategy)
        if strategy is not None:
            activation.activate()

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy whose engine this is; None if it belongs to none."""
        return None if self._strategy is None else self._strategy()

    def _answer(self, call: Call) -> Any:
        method = self._answers.get(call.name)
        return call.proceed() if method is None else getattr(self, method)(call)

    def run(self, call: Call) -> Any:
        """Runs `compile`, `fit`, `evaluate`, `predict`, or `*_on_batch` of a model."""
        return self._answer(call)

    def save(self, call: Call) -> Any:
        """Writes a model: by `save`, `save_weights` or `export`.

        `has_memory_for_file` returns whether a file may be in memory while it is written or read.
        """
        return self._answer(call)

    def on(self, event: Call) -> Any:
        """Has callbacks hear of an event of `fit`, or do what they do to files.

        `set_model`, `train_begin`, `epoch_begin`, `batch_end` and `epoch_end` go to a list of
        callbacks. `steps_end` returns logs of a model's epoch, before validation, `test_steps_end`
        those of an evaluation. `checkpoint`, `backup`, `restore` and `end_backup` are callbacks'.
        """
        return self._answer(event)

    def build(self, call: Call) -> Any:
        """Makes the variables of a model, its metrics and optimizer."""
        return self._answer(call)

    def make_step(self, call: Call) -> Any:
        """Makes a function that takes steps.

        `make_function` returns that of `fit` or `evaluate`; `make_predict_function` sets one.
        """
        return self._answer(call)

    def data(self, call: Call) -> Any:
        """Chooses the data that this process reads.

        `make_iterator` is the constructor of Keras's epoch iterator; `drain` waits for all steps.
        """
        return self._answer(call)

    def make_variable(self, call: Call) -> Any:
        """Makes variables.

        `make_variable` is the constructor of a Keras variable; `initialize` makes TensorFlow's of a
        value, `initialize_with_initializer` of what is drawn. `add_weight` makes one of a layer,
        `build_optimizer` all slots of an optimizer, and `add_slot` one. `make_table` makes the
        value of a dynamic table.
        """
        return self._answer(call)

    def write(self, call: Call) -> Any:
        """Gives a variable a value: by `assign`, `assign_add` or `assign_sub`.

        `set_weights` changes all weights of a model, and `change_averages` those that an optimizer
        averages, or their averages.
        """
        return self._answer(call)

    def read(self, call: Call) -> Any:
        """Reads a variable: all of it by `numpy`, rows by `take` or `sparse_read`.

        Keras's variables have no `sparse_read`, so that its answer is AttributeError.
        """
        return self._answer(call)

    def layer(self, call: Call) -> Any:
        """Makes or calls a layer.

        `make_layer` is the constructor. In a replica's step, `call_layer` is `Layer.__call__`,
        `run_graph` runs all layers of a functional model, and `next_seed` draws the next seed of a
        layer's generator. `sparse_categorical_crossentropy`, `categorical_crossentropy` and
        `argmax` take logits of which workers may have parts.
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
        return list(optimizer._clip_gradients(grads))

    def decay(self, optimizer: Optimizer, variables: Variables) -> None:
        """Applies weight decay."""
        optimizer._apply_weight_decay(variables)

    def update(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> None:
        """Changes variables and slots by gradients, which are those of all replicas."""
        optimizer._backend_update_step(grads, variables, optimizer.learning_rate)

    def push(self, optimizer: Optimizer, grads: Sequence[Any], variables: Sequence[Any]) -> Pairs:
        """Sends gradients to where variables are; returns pairs that are still to be updated."""
        return list(zip(grads, variables))

    def average(self, optimizer: Optimizer, variables: Variables) -> None:
        """Updates the moving averages of weights."""
        optimizer._update_model_variables_moving_average(variables)


def engine_of(strategy: object) -> Engine | None:
    """Engine of a strategy, or None if the strategy is not this library's."""
    return getattr(strategy, "engine", None)
