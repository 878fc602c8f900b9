"""Variables that are made from values, whose shape Keras takes from these."""

import keras
import numpy as np
import pytest

from tests.support.cluster import equals_one_process, run
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


class Scaled(keras.layers.Layer):
    """A learned temperature, and a constant."""

    def __init__(self):
        super().__init__()
        self.learned = keras.Variable(0.5)
        self.fixed = keras.Variable(np.ones(4, "float32"), trainable=False)

    def call(self, x):
        return x * self.learned + self.fixed


def fitted(model, x):
    model.compile("sgd", "mse")
    y = x.reshape(len(x), -1)[:, :2]
    return model, model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history


def scaled():
    layers = keras.layers.Dense(4), Scaled(), keras.layers.Dense(2)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    return fitted(keras.Sequential([keras.Input((3,)), *layers]), x)


def stateful():
    layers = keras.layers.LSTM(4, stateful=True), keras.layers.Dense(2)
    x = np.random.default_rng(0).normal(size=(8, 5, 3)).astype("float32")
    return fitted(keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), *layers]), x)


def refused():
    with pytest.raises(ValueError, match="is stateful: it goes on with the state") as error:
        stateful()
    return {"message": str(error.value)}


@pytest.mark.parametrize("layout", ["sync_threads", *extended("all2")])
def test_learned_numbers_equal_one_process(layout):
    equals_one_process(layout, scaled)


@pytest.mark.extended
def test_states_of_rows_that_all_workers_have():
    equals_one_process("tp2", stateful)


def test_states_of_rows_that_are_dealt_out_are_refused():
    run("sync_threads", refused, may_show_errors=True)
