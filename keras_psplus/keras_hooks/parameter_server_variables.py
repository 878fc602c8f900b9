"""Keras variables under `ParameterServerStrategy`: where they are made, read and added to."""

import math

import tensorflow as tf
from keras.src import layers
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow import core

from keras_psplus.keras_hooks import step_registry
from keras_psplus.keras_hooks.ownership import asynchronous
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.keras_hooks.variables import accumulates
from keras_psplus.parameter_server.worker_function import TravellingVariable, current

# Elements. Whatever travels crosses the chief's network with every share of a step.
_LARGEST_STATE = 1 << 16


def install():
    """Installs this module's hooks."""
    replace(core.Variable, "__init__", ["self", "initializer"])(_note_owner)
    replace(core.Variable, "_initialize", ["self", "value"])(_initialize)
    replace(core.Variable, "_direct_assign", ["self", "value"])(_after_earlier_steps)
    replace(core.Variable, "numpy", ["self"])(_after_earlier_steps)
    replace(core.Variable, "assign_add", ["self", "value"])(_atomically("assign_add"))
    replace(core.Variable, "assign_sub", ["self", "value"])(_atomically("assign_sub"))


def _note_owner(original, self, *args, **kwargs):
    # Here, as some are initialized later, when nothing tells any more.
    scopes = global_state.get_global_attribute("name_scope_stack")
    self._is_of_layer = bool(scopes) and isinstance(scopes[-1].caller, layers.Layer)
    original(self, *args, **kwargs)
    self._is_made_to_train = self._trainable


def _initialize(original, self, value):
    strategy = asynchronous(tf.distribute.get_strategy())
    if strategy is None:
        return original(self, value)
    # A frozen layer's weights are initialized after they were frozen. They may come to be trained.
    trainable = self._trainable
    self._trainable = getattr(self, "_is_made_to_train", trainable)
    try:
        shape = getattr(self, "_shape", None)
        if shape is None and not callable(value):
            shape = getattr(value, "shape", None)
        with strategy.extended.creating(self.path, _kind(self, strategy), shape):
            return original(self, value)
    finally:
        self._trainable = trainable


def _kind(variable, strategy):
    """What kind of travelling variable a variable is to be, or None."""
    if variable._name == "seed_generator_state":
        return "seed"
    if accumulates(variable):
        return "total"
    return "state" if strategy.mode == "sync" and _is_state(variable) else None


def _is_state(variable):
    """Whether a variable is a layer's own, which steps change otherwise than by gradients."""
    dtype = tf.as_dtype(variable.dtype)
    return (
        variable._is_of_layer
        and not variable.trainable
        and (dtype.is_floating or dtype.is_integer)
        and math.prod(variable.shape) <= _LARGEST_STATE
    )


def _after_earlier_steps(original, self, *args):
    # From a callback, for example: steps that were sent before come before.
    if current() is None and tf.executing_eagerly():
        travels = isinstance(self._value, TravellingVariable)
        if travels or on_ps(self._value):
            for strategy in step_registry.strategies():
                if travels:
                    step_registry.drain(strategy)
                elif strategy.scheduler.is_busy:
                    strategy.scheduler.join()
    return original(self, *args)


def _atomically(method):
    def assign(original, self, value):
        variable = self._value
        is_shared = on_ps(variable) or isinstance(variable, TravellingVariable)
        if in_stateless_scope() or not is_shared or tf.executing_eagerly():
            return original(self, value)
        # Keras reads, adds and writes: another worker's step in between would be lost.
        return getattr(variable, method)(tf.cast(value, variable.dtype), read_value=False)

    return assign


def on_ps(variable):
    """Whether a variable of TensorFlow's lies on a parameter server."""
    return "/job:ps/" in (getattr(variable, "device", None) or "")
