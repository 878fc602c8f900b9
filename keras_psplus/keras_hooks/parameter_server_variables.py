"""Keras variables under `ParameterServerStrategy`: where they are made, read and added to."""

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow import core

from keras_psplus.keras_hooks import step_registry
from keras_psplus.keras_hooks.ownership import asynchronous, note_live
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.keras_hooks.variables import accumulates
from keras_psplus.parameter_server.worker_function import TravellingVariable, current


def install():
    """Installs this module's hooks."""
    replace(core.Variable, "_initialize", ["self", "value"])(_initialize)
    replace(core.Variable, "_direct_assign", ["self", "value"])(_after_earlier_steps)
    replace(core.Variable, "numpy", ["self"])(_after_earlier_steps)
    replace(core.Variable, "assign_add", ["self", "value"])(_atomically("assign_add"))
    replace(core.Variable, "assign_sub", ["self", "value"])(_atomically("assign_sub"))
    # tf.gather asks its argument for this method: without it a lookup pulls the whole table.
    core.Variable.sparse_read = _sparse_read


def _initialize(original, self, value):
    strategy = asynchronous(tf.distribute.get_strategy())
    if strategy is None:
        return original(self, value)
    note_live(strategy)
    is_seed = self._name == "seed_generator_state"
    with strategy.extended.creating(self.path, accumulates(self) or is_seed, is_seed):
        return original(self, value)


def _after_earlier_steps(original, self, *args):
    # From a callback, for example: steps that were sent before come before.
    if current() is None and tf.executing_eagerly():
        travels = isinstance(self._value, TravellingVariable)
        if travels or _on_ps(self._value):
            for strategy in step_registry.strategies():
                if travels:
                    step_registry.drain(strategy)
                elif strategy.scheduler.is_busy:
                    strategy.scheduler.join()
    return original(self, *args)


def _atomically(method):
    def assign(original, self, value):
        variable = self._value
        is_shared = _on_ps(variable) or isinstance(variable, TravellingVariable)
        if in_stateless_scope() or not is_shared or tf.executing_eagerly():
            return original(self, value)
        # Keras reads, adds and writes: another worker's step in between would be lost.
        return getattr(variable, method)(tf.cast(value, variable.dtype), read_value=False)

    return assign


def _on_ps(variable):
    return "/job:ps/" in (getattr(variable, "device", None) or "")


def _sparse_read(self, indices, name=None):
    if in_stateless_scope() or not _on_ps(self._value):
        # As if Keras's variables had no such method: tf.gather reads the whole value then.
        raise AttributeError("sparse_read")
    return self._maybe_autocast(self._value.sparse_read(indices, name=name))
