"""Functions for XLA are given weights by their calls, of whatever step these are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.sharding.units import given_by_calls


class Weight:
    """A weight that counts how often it is gathered."""

    path, shape, dtype = "layer/kernel", tf.TensorShape([2]), tf.float32

    def __init__(self):
        self.given_to, self.gathered = set(), 0

    def value(self):
        given = given_by_calls(self)
        if given is not None:
            return given
        self.gathered += 1
        return tf.constant([2.0, 3.0])


def test_each_call_reads_what_the_function_is_given():
    weight, traces = Weight(), []

    @tf.function
    def inner(x):
        return tf.cond(tf.reduce_all(x > 0), lambda: x * weight.value(), lambda: x)

    @tf.function(jit_compile=True)
    def function(x):
        traces.append(1)
        return inner(x) + weight.value()

    for step in (lambda x: function(x), lambda x: function(function(x))):
        before = weight.gathered
        found = tf.function(step)(tf.ones([2]))
        calls = weight.gathered - before
        np.testing.assert_allclose(found, [4.0, 6.0] if calls == 1 else [10.0, 21.0])
    # The second step has two calls, and shares the first one's trace.
    assert len(traces) == 1 and weight.gathered == 3


def test_what_is_computed_once_more_is_refused():
    weight = Weight()

    @tf.function(jit_compile=True)
    def function(x):
        return keras.remat(lambda x: x * weight.value())(x)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    with pytest.raises(ValueError, match="computes with 'layer/kernel' once more"):
        step(tf.ones([2]))
