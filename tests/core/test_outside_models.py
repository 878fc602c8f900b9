"""A model that was built outside of the scope, beside a strategy that distributes training."""

import gc
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus
from keras_psplus import activation, log
from keras_psplus.core import live as live_strategies

X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
METHODS = {
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "compile": lambda model: model.compile("sgd", "mse"),
}


class Strategy:
    """Something to be noted as live, in the place of one that would need another process."""


@pytest.fixture
def live():
    strategy = Strategy()
    live_strategies.note(strategy, in_cluster=False)
    yield strategy
    del strategy


def compiled(name="baseline"):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name=name)
    with keras_psplus.single_process():
        model.compile("sgd", keras.losses.MeanSquaredError())
    return model


def refusal(method, model):
    with pytest.raises(ValueError) as error:
        METHODS[method](model)
    return str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_it_is_refused_by_name(method, live):
    message = refusal(method, compiled())
    assert "The model 'baseline' was built outside the strategy's scope" in message
    assert "with strategy.scope():" in message
    assert f"call `{method}` under `with keras_psplus.single_process():`" in message
    assert "Received: " in message


@pytest.mark.parametrize("method", METHODS)
def test_it_trains_and_evaluates_where_the_script_asks_for_that(method, live):
    model = compiled()
    with keras_psplus.single_process():
        METHODS[method](model)


def test_the_context_ends(live):
    with pytest.raises(ZeroDivisionError):
        with keras_psplus.single_process():
            raise ZeroDivisionError
    refusal("fit", compiled())


def test_models_of_other_scopes_are_left_alone(live):
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("options", [{}, {"updates": "accumulate"}])
def test_a_strategy_of_one_replica_is_as_none(options):
    if options:
        options = {"updates": keras_psplus.updates.Accumulate(2)}
    strategy = keras_psplus.MultiWorkerMirroredStrategy(**options)
    with strategy.scope():
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]).compile("sgd", "mse")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    for method in ("compile", "fit", "evaluate"):
        METHODS[method](model)


def test_predictions_are_right_and_said_once(live, monkeypatch):
    lines = []
    monkeypatch.setattr(
        log.logger, "log", lambda level, message, *args: lines.append(message % args)
    )
    model = compiled("once_said")
    with keras_psplus.single_process():
        expected = model.predict(X, verbose=0)
    assert not lines
    for _ in range(2):
        np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    (line,) = lines
    assert "predict: the model 'once_said' was built outside the strategy's scope" in line


def test_a_file_can_be_loaded_for_inference(live, tmp_path):
    model = compiled()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert "single_process" in refusal("evaluate", loaded)
    assert "single_process" in refusal("compile", loaded)


def test_it_may_be_called_by_others(live):
    assert compiled()(X).shape == (8, 1)


def test_a_strategy_that_is_gone_counts_no_more():
    strategy = Strategy()
    strategy.itself = strategy
    live_strategies.note(strategy, in_cluster=False)
    gc.disable()
    try:
        del strategy
        assert live_strategies.exist()
        compiled().fit(X, Y, verbose=0)
    finally:
        gc.enable()


def test_a_member_of_a_cluster_stays_one(monkeypatch):
    monkeypatch.setattr(live_strategies, "_of_clusters", [])
    live_strategies.note(Strategy(), in_cluster=True)
    gc.collect()
    assert "outside the strategy's scope" in refusal("fit", compiled())


def test_a_tuner_without_the_strategy_is_helped(live, monkeypatch):
    class FatalValueError(ValueError):
        """What KerasTuner does not take for a failed trial."""

    tuners = types.SimpleNamespace(errors=types.SimpleNamespace(FatalValueError=FatalValueError))
    monkeypatch.setitem(sys.modules, "keras_tuner", tuners)

    def build():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", keras.losses.MeanSquaredError())
        return model

    # A tuner's constructor builds a model before the tuner knows its strategy.
    model = build()
    with pytest.raises(FatalValueError, match="`distribution_strategy=strategy`"):
        model.fit(X, Y, verbose=0)
    with keras_psplus.single_process():
        model.fit(X, Y, verbose=0)
    monkeypatch.delitem(sys.modules, "keras_tuner")
    assert "KerasTuner" not in refusal("compile", compiled())
    with pytest.raises(ValueError, match="outside the strategy's scope"):
        build()


def test_gradients_of_mirrored_variables_are_refused_in_a_scope():
    activation.activate()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        weight = tf.Variable(1.0, name="weight")
        with tf.GradientTape() as tape:
            loss = 2.0 * weight
        with pytest.raises(ValueError, match="outside of it, .*Received: sources with 'weight"):
            tape.gradient(loss, [weight])
