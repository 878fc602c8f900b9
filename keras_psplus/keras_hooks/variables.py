"""Keras variables and seeds under our strategies."""

import tensorflow as tf
from keras.src.backend.tensorflow import core
from keras.src.random import seed_generator

from keras_psplus.keras_hooks.ownership import our_scope, our_step
from keras_psplus.keras_hooks.patching import replace

# Odd, so that no two replicas of any job share a seed (mod 2 ** 31).
_SEED_STRIDE = 0x3C6EF35F


def accumulates(variable):
    """Whether a Keras variable is a metric's state, a total over replicas."""
    return variable.synchronization == "on_read" and variable.aggregation == "sum"


def install():
    """Installs this module's hooks."""

    @replace(core.Variable, "_initialize", ["self", "value"])
    def initialize(original, self, value):
        strategy = our_scope()
        if strategy is None:
            return original(self, value)
        # Metric states are made global within the step. As TensorFlow's SyncOnRead variables they
        # would cost a collective for each read, and a chief that saves alone would wait for ever.
        with strategy.extended.creating(self.path, accumulates(self)):
            return original(self, value)

    @replace(core.Variable, "_direct_assign", ["self", "value"])
    def direct_assign(original, self, value):
        step = our_step()
        if step is not None and step.recording:
            if accumulates(self):
                step.record_total(self._value)
            elif self._value.dtype.is_floating:
                step.record(self._value)
        return original(self, value)

    for name, number in (("__float__", float), ("__int__", int)):
        replace(core.Variable, name, ["self"])(_as_number(number))

    @replace(seed_generator.SeedGenerator, "next", ["self", "ordered"])
    def next_seed(original, self, ordered=True):
        seed = original(self, ordered)
        step = our_step()
        if step is None:
            return seed
        # The state stays one value on all replicas, so that it can be saved and restored; what is
        # drawn from it differs, or all replicas would drop the same units of different rows.
        offset = step.rank * _SEED_STRIDE % (1 << 31)
        return seed + tf.constant([offset, 0], seed.dtype) if offset else seed


def _as_number(number):
    def convert(original, self):
        # TensorFlow's mirrored variables lack what callbacks do with a learning rate.
        if isinstance(self._value, tf.distribute.DistributedValues):
            return number(self._value.numpy())
        return original(self)

    return convert
