"""Rows that keys begin with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.tables import keys


@pytest.mark.parametrize(
    "kind", [keras.initializers.RandomUniform, keras.initializers.RandomNormal]
)
def test_a_row_is_the_same_in_a_graph(kind):
    found = tf.constant(np.random.default_rng(0).integers(-(2**62), 2**62, 50))
    make = keys.maker({"initializer": keys.check_initializer(kind(seed=3)), "dim": 9})
    in_graph = tf.function(make, autograph=False)
    np.testing.assert_array_equal(in_graph(found), make(found))


def test_keys_are_the_bits_of_integers():
    ids = np.array([2**64 - 5, 3], np.uint64)
    assert keys.to_keys(tf.constant(ids), "t").numpy().tolist() == [-5, 3]
