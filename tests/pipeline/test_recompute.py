"""`recompute=True`: the same results as without, from activations that are computed twice."""

import itertools

import keras
import pytest

import keras_psplus as psp
from keras_psplus.pipeline.base import schedule
from keras_psplus.pipeline.graph import recompute
from tests.pipeline.test_training import (  # noqa: F401
    MODELS,
    NAMES,
    TOKENS,
    X,
    alone,
    check_equal,
    pipeline,
    train,
)

layers = keras.layers
TURNS = itertools.cycle(schedule.SCHEDULES)


@pytest.mark.parametrize("make, name", list(zip(MODELS, TURNS)), ids=NAMES)
def test_equals_plain_keras(make, name, alone, pipeline):  # noqa: F811
    strategy = pipeline(2, microbatches=3, schedule=name, recompute=True)
    check_equal(train(strategy, make), alone(make))


class Counts(layers.Layer):
    """Adds to a variable of its own at each call, and uses it."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1.0)
        return x * (1.0 + 0.01 * self.calls)


def stateful():
    stack = [layers.Dense(12), layers.BatchNormalization(momentum=0.7), layers.Dropout(0.3)]
    stack += [Counts(), layers.Dense(8, activation="tanh"), layers.GaussianNoise(0.1)]
    stack += [layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)]
    return keras.Sequential(stack), X


def noisy():
    cell = layers.SimpleRNN(8, dropout=0.2, return_sequences=True)
    stack = [layers.Embedding(40, 8), layers.SpatialDropout1D(0.2), cell]
    stack += [layers.GlobalAveragePooling1D(), layers.Dense(8, activity_regularizer="l2")]
    return keras.Sequential([*stack, layers.Dropout(0.5), layers.Dense(3)]), TOKENS


@pytest.mark.parametrize(
    "make, name", [(stateful, "1f1b"), (stateful, "pipedream"), (noisy, "gpipe")]
)
def test_state_and_seeds_are_used_once(make, name, pipeline):  # noqa: F811
    runs = [
        train(pipeline(2, microbatches=3, schedule=name, recompute=again), make)
        for again in (False, True)
    ]
    check_equal(*runs)


def test_activations_are_computed_twice_in_training_alone(pipeline, monkeypatch):  # noqa: F811
    repeated = []
    original = recompute.StageReplay._repeat

    def repeat(self, call):
        repeated.append(call.layer.name)
        original(self, call)

    monkeypatch.setattr(recompute.StageReplay, "_repeat", repeat)
    strategy = pipeline(2, microbatches=3, schedule="1f1b", recompute=True)
    keras.backend.clear_session()
    with strategy.scope():
        stack = [layers.Dense(12, name=f"layer_{i}") for i in range(4)]
        model = keras.Sequential([keras.Input((12,)), *stack, Counts(name="counts")])
        model.compile("sgd", "mse")
    model.predict(X, verbose=0)
    model.evaluate(X, X, verbose=0)
    assert not repeated
    model.fit(X[:48], X[:48], batch_size=48, verbose=0)
    # Not a layer that changes a variable which it uses. Each of three micro-batches.
    assert sorted(repeated) == sorted([f"layer_{i}" for i in range(4)] * 3)


def test_it_is_a_flag():
    with pytest.raises((TypeError, ValueError), match="`recompute`.*Received: "):
        psp.PipelineStrategy(recompute="yes")
