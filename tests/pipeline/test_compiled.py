"""Stages that XLA compiles, beside plain Keras."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.cluster.testing import run_in_processes
from keras_psplus.core.graph import compiled_calls
from tests.pipeline import test_training
from tests.pipeline.test_training import (  # noqa: F401
    PADDED,
    TOKENS,
    alone,
    check_equal,
    pipeline,
    train,
)
from tests.selection import cases

layers = keras.layers
JOB = pathlib.Path(__file__).with_name("compiled_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


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


class Slope(layers.Layer):
    """Computes with gradients by its input."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8, "tanh")

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.dense(x)
        return x + tape.gradient(y, x)


class Attends(keras.Model):
    """Calls a layer of a stage with the same tensor twice."""

    def __init__(self):
        super().__init__()
        self.table, self.attention = layers.Embedding(40, 8), layers.MultiHeadAttention(2, 4)
        self.slope, self.out = Slope(), layers.Dense(3)

    def call(self, x):
        h = self.slope(self.table(x))
        return self.out(keras.ops.mean(self.attention(h, h), 1))


def same_twice():
    return Attends(), TOKENS


def masks():
    """A mask goes from stage to stage, and to a loop, which is not compiled."""
    stack = [layers.Embedding(40, 8, mask_zero=True), layers.Dense(16, "tanh"), layers.Dense(8)]
    return keras.Sequential([*stack, layers.SimpleRNN(8), layers.Dense(3)]), PADDED


@pytest.mark.parametrize(
    "make, schedule",
    [
        (same_twice, "1f1b"),
        (test_training.skips, "1f1b"),
        (test_training.losses_of_layers, "gpipe"),
        (test_training.attention, "1f1b"),
        (test_training.nested, "gpipe"),
        (test_training.shared, "1f1b"),
        (masks, "1f1b"),
    ],
)
def test_compiled_stages_equal_plain_keras(make, schedule, alone, pipeline, counted):  # noqa: F811
    found = train(pipeline(2, microbatches=3, schedule=schedule), make, jit_compile=True)
    check_equal(found, alone(make))
    # That of predict, whose last batch has two rows.
    calls, functions, _ = counted.found
    assert calls >= 2 and functions <= calls


@pytest.fixture(scope="module")
def on_workers(request, tmp_path_factory):
    """The folder of what real workers have left."""
    folder = tmp_path_factory.mktemp("on_workers")
    args = [folder, ",".join(cases(request, argument="name"))]
    run_in_processes(JOB, workers=2, chief=True, timeout=560, env=ENVIRONMENT, args=args)
    return folder


@pytest.mark.parametrize("name", ["skips", "attention"])
def test_compiled_stages_on_workers_equal_plain_keras(name, alone, on_workers):  # noqa: F811
    model, history, predicted = alone(getattr(test_training, name))
    weights = {f"weight_{i}": one for i, one in enumerate(model.get_weights())}
    found = np.load(on_workers / f"{name}.npz")
    expected = {"predicted": predicted, **history, **weights}
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-5, err_msg=key)


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
