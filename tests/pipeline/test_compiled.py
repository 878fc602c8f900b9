"""Stages that XLA compiles; `test_training.py` holds them against plain Keras."""

import keras
import numpy as np
import pytest

from tests.pipeline import models
from tests.support.cluster import equals_one_process, makes_scope, strategy_of

pytestmark = pytest.mark.processes

layers = keras.layers


@makes_scope
def compiled(scope, name):
    strategy, make = strategy_of(scope), getattr(models, name)
    compiles = True if hasattr(strategy, "engine") else "auto"
    model, history, predicted = models.train(strategy, make, jit_compile=compiles)
    return model, {**history, "predicted": predicted}


@pytest.mark.extended
def test_compiled_stages_on_workers_equal_plain_keras():
    equals_one_process("pipeline2", compiled, name="skips")


def test_microbatches_share_the_functions_of_stages(pipeline, counted):
    def run(jit_compile):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with pipeline(2, microbatches=4, schedule="pipedream").scope():
            stack = [layers.Dense(12, "tanh") for _ in range(4)]
            model = keras.Sequential([keras.Input((12,)), *stack])
            model.compile("sgd", "mse", jit_compile=jit_compile)
        x = models.X[:48]
        history = model.fit(x, x, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        return history["loss"], model.get_weights()

    losses, weights = run(True)
    assert counted.found == (8, 2, [])
    others = run(False)
    np.testing.assert_allclose(losses, others[0], rtol=2e-5)
    for found, expected in zip(weights, others[1]):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_what_no_stage_can_compile_is_refused_by_name(pipeline):
    def make():
        stack = [layers.Embedding(40, 8), layers.SimpleRNN(3)]
        return models.Task(keras.Sequential(stack), models.PADDED)

    with pytest.raises(ValueError, match="none that XLA can compile: .*activations again"):
        models.train(pipeline(2, recompute=True), make, jit_compile=True)
