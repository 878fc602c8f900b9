"""Variables of layers, which are made on their stage once that is known.

A model's first values must not come together on the chief, which may have less memory than all
stages. So a variable whose stage is not known yet is not made: Keras itself knows variables without
a value. It is made when it is given a value or read, on the stage that has the least.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.pipeline.base.stages import Stages, is_in_layer
from keras_psplus.pipeline.extended import making_on
from keras_psplus.pipeline.replicas import Copies


class Variables:
    """Makes and moves the variables of one strategy."""

    def __init__(self, strategy: tf.distribute.Strategy, stages: Stages, copies: Copies) -> None:
        self._strategy: Callable[[], tf.distribute.Strategy] = weakref.ref(strategy)
        self._stages, self._copies = stages, copies
        self._bytes = [0] * len(stages.devices)
        # By ids, as Keras's variables have no hash: variables with their stages, and slots with the
        # variables that they belong to.
        self._placed: dict[int, tuple[Any, int]] = {}
        self._slots: dict[int, tuple[Any, Any]] = {}

    def initialize(self, variable: keras.Variable, initializer: Any) -> None:
        """Makes a variable that a layer or something else makes, or leaves it for later."""
        device = self._strategy().extended.device_of_making
        number = self._stages.of_scope()
        if device is not None:
            self._make(variable, initializer, self._stages.of_device(device), device)
        elif number is not None:
            self._make(variable, initializer, number)
        elif not is_in_layer():
            self._make(variable, initializer, len(self._bytes) - 1)
        elif variable._initializer is not None:
            # Keras forgets the initializer of a variable that it had deferred.
            self._make(variable, initializer, self._emptiest())
        else:
            variable._value, variable._initializer = None, initializer

    def beside(self, variable: keras.Variable) -> AbstractContextManager[None]:
        """Context in which variables are made where another one is."""
        self.ensure(variable)
        return making_on(self._strategy(), variable._value.device)

    def ensure(self, variable: keras.Variable) -> None:
        """Makes a variable that is not made yet."""
        if variable._value is None and variable._initializer is not None:
            self.put(variable, self._emptiest())

    def put(self, variable: keras.Variable, number: int, pipeline: int = 0) -> None:
        """Makes a variable on a pipeline's stage, or moves it there."""
        device = self._stages.device(number, pipeline)
        if variable._value is None and variable._initializer is not None:
            initializer, variable._initializer = variable._initializer, None
            self._make(variable, initializer, number, device)
        elif isinstance(variable._value, tf.Variable) and variable._value.device != device:
            old = variable._value
            with making_on(self._strategy(), device), tf.name_scope(""):
                variable._value = tf.Variable(
                    _on(device, old.read_value),
                    trainable=old.trainable,
                    name=old.name.removesuffix(":0"),
                )
            # Optimizers know a variable by this.
            variable._value._unique_id = old._unique_id

    def place(self, variable: keras.Variable, number: int) -> None:
        """Puts a variable on a stage for good: traced functions know it there."""
        if self.stage_of_placed(variable) is None:
            pipeline = self._copies.pipeline_for(variable, number)
            self.put(variable, number, pipeline)
            self._placed[id(variable)] = weakref.ref(variable), number
            self._copies.make(variable, number, pipeline)

    def stage_of_placed(self, variable: keras.Variable) -> int | None:
        known, number = self._placed.get(id(variable), (lambda: None, None))
        return number if known() is variable else None

    def note_slot(self, slot: keras.Variable, reference: keras.Variable) -> None:
        """Notes a slot of an optimizer, which follows its variable."""
        self._slots[id(slot)] = weakref.ref(slot), weakref.ref(reference)

    def place_slots(self) -> None:
        """Puts slots where their variables were placed since."""
        for key, (slot, reference) in list(self._slots.items()):
            if slot() is None or reference() is None:
                del self._slots[key]
                continue
            number = self.stage_of_placed(reference())
            if number is not None and self.stage_of_placed(slot()) is None:
                pipeline = self._copies.pipeline_of(reference())
                self.put(slot(), number, pipeline)
                self._placed[key] = slot, number

    def _make(
        self,
        variable: keras.Variable,
        initializer: Callable[..., Any],
        number: int,
        device: str | None = None,
    ) -> None:
        device, trainable = device or self._stages.devices[number], variable._trainable
        # It may be frozen before it is made, and thawed after.
        variable._trainable = getattr(variable, "_is_made_to_train", trainable)
        # By its name, an optimizer may leave it out of weight decay: it is that of one process.
        scope, slash, _ = variable.path.rpartition("/")
        try:
            with making_on(self._strategy(), device), tf.name_scope(scope + slash):
                variable._initialize(
                    _on(device, lambda: initializer(variable._shape, dtype=variable._dtype))
                )
        finally:
            variable._trainable = trainable
        self._bytes[number] += variable._value.shape.num_elements() * variable._value.dtype.size

    def _emptiest(self) -> int:
        return self._bytes.index(min(self._bytes))


def _on(device: str, function: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
    """A function without arguments that runs on a device, also where TensorFlow clears devices."""

    def on_device() -> tf.Tensor:
        with tf.device(device):
            return function()

    return on_device
