"""Optimizers whose formulas read more than a variable and its slots, under every strategy."""

import keras
import numpy as np
import pytest

from tests.support.cluster import equals_one_process
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


def trained(optimizer, epochs=4):
    """A model with a table, of which a batch has each row once.

    Servers update no other rows, and sum those of one id before they square them.
    """
    rng = np.random.default_rng(0)
    ids = rng.permutation(12).reshape(6, 2).astype("int32")
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(12, 4, name="table"),
            keras.layers.Flatten(),
            keras.layers.Dense(6, "tanh", name="first"),
            keras.layers.Dense(2, name="last"),
        ]
    )
    model.compile(optimizer(model), "mse")
    y = rng.normal(size=(6, 2)).astype("float32")
    history = model.fit(ids, y, batch_size=6, epochs=epochs, shuffle=False, verbose=0).history
    return model, history


def nadam():
    return trained(lambda model: keras.optimizers.Nadam(0.05))


class Warmed(keras.optimizers.SGD):
    """A formula with a vector that is read, and a number that each step changes."""

    def build(self, variables):
        super().build(variables)
        self.rates = keras.Variable([0.5, 1.0, 2.0])
        self.steps = keras.Variable(0.0)

    def update_step(self, gradient, variable, learning_rate):
        rate = keras.ops.sum(self.rates.value) / 3.0
        self.assign_add(self.steps, 0.25)
        super().update_step(gradient, variable, learning_rate * rate * (1.0 + self.steps.value))


def warmed():
    return trained(lambda model: Warmed(0.05))


def decayed(names=(), by_variable=False):
    def optimizer(model):
        adamw = keras.optimizers.AdamW(0.05, weight_decay=0.5)
        if by_variable:
            adamw.exclude_from_weight_decay([model.get_layer("first").kernel])
        else:
            adamw.exclude_from_weight_decay(var_names=list(names))
        return adamw

    return trained(optimizer)


@pytest.mark.parametrize("layout", ["all2", *extended("stages2", "opt2", "tp2", "hybrid22")])
def test_a_variable_of_the_optimizer_that_is_no_slot(layout):
    equals_one_process(layout, nadam)
    if layout != "hybrid22":  # Servers refuse formulas that they do not know.
        equals_one_process(layout, warmed)


@pytest.mark.parametrize(
    "layout", ["stages2", *extended("all2", "tp2", "hybrid22", "sync_threads")]
)
def test_names_that_weight_decay_leaves_out(layout):
    equals_one_process(layout, decayed, names=["first", "^sequential/table/embeddings:0$"])
    equals_one_process(layout, decayed, by_variable=True)
