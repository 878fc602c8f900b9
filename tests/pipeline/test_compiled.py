"""Stages that XLA compiles, beside plain Keras."""

import keras
import numpy as np
import pytest

from keras_psplus.core.graph import compiled_calls
from tests.pipeline import test_training
from tests.pipeline.test_training import PADDED, alone, check_equal, pipeline, train  # noqa: F401

layers = keras.layers


class Counted(compiled_calls.CompiledCalls):
    """Counts calls, and the functions that they are of."""

    found = ()

    def check(self):
        Counted.found = self.count, sum(map(len, self._functions.values())), self.reasons
        super().check()


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr("keras_psplus.core.distributed_engine.CompiledCalls", Counted)
    return Counted


@pytest.mark.parametrize(
    "make, schedule",
    [
        ("skips", "1f1b"),
        ("losses_of_layers", "gpipe"),
        ("attention", "1f1b"),
        ("nested", "gpipe"),
        ("masks", "1f1b"),
    ],
)
def test_compiled_stages_equal_plain_keras(make, schedule, alone, pipeline, counted):  # noqa: F811
    make = getattr(test_training, make)
    found = train(pipeline(2, microbatches=3, schedule=schedule), make, jit_compile=True)
    check_equal(found, alone(make))
    # That of predict, whose last batch has two rows.
    calls, functions, _ = counted.found
    assert calls >= 2 and functions <= calls


def test_microbatches_share_the_functions_of_stages(pipeline, counted):  # noqa: F811
    def run(jit_compile):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with pipeline(2, microbatches=4, schedule="pipedream").scope():
            model = keras.Sequential(
                [keras.Input((12,)), *[layers.Dense(12, "tanh") for _ in range(4)]]
            )
            model.compile("sgd", "mse", jit_compile=jit_compile)
        x = test_training.X[:48]
        history = model.fit(x, x, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        return history["loss"], model.get_weights()

    losses, weights = run(True)
    assert counted.found == (8, 2, [])
    others = run(False)
    np.testing.assert_allclose(losses, others[0], rtol=2e-5)
    for found, expected in zip(weights, others[1]):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_what_no_stage_can_compile_is_refused_by_name(pipeline):  # noqa: F811
    def make():
        return keras.Sequential([layers.Embedding(40, 8), layers.SimpleRNN(3)]), PADDED

    with pytest.raises(ValueError, match="none that XLA can compile: .*activations again"):
        train(pipeline(2, recompute=True), make, jit_compile=True)
