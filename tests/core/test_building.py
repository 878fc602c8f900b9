"""Models are built as Keras builds them, and by their own steps where that does not serve."""

import keras
import pytest
import tensorflow as tf

from keras_psplus import log
from keras_psplus.core.models import Builder, trace

BATCH = tf.zeros((4, 3)), tf.zeros((4, 1))


class Own(keras.Model):
    """A model whose step uses a layer that its call does not."""

    def __init__(self, has_call=True):
        super().__init__()
        self.used, self.further = keras.layers.Dense(1), keras.layers.Dense(1)
        self.has_call = has_call

    def call(self, x):
        if not self.has_call:
            raise NotImplementedError("this model has no call")
        return self.used(x)

    def train_step(self, data):
        x, _ = data
        return {"loss": tf.reduce_mean(self.used(x) + self.further(x))}


def built(model, how):
    model.compile(keras.optimizers.SGD())
    Builder(how).build(model, "train_step", BATCH)
    return model.used.built, model.further.built


def fails(model, step, spec):
    raise ValueError("no graph of this step\nsecond line")


def by_trace(model, step, spec):
    trace(step, spec)


@pytest.mark.parametrize("has_call", [True, False])
def test_the_step_builds_what_a_call_leaves(has_call):
    assert built(Own(has_call), by_trace) == (True, True)


def test_a_step_that_cannot_be_traced_is_said_where_the_call_has_built(caplog, monkeypatch):
    monkeypatch.setattr(log, "_logged", set())
    assert built(Own(), fails) == (True, False)
    assert "train_step of the model" in caplog.text
    assert caplog.text.count("Received: ValueError: no graph of this step") == 1
    assert "second line" not in caplog.text


@pytest.mark.parametrize("can_be_traced", [True, False])
def test_metrics_go_by_the_labels_that_the_step_makes(can_be_traced, monkeypatch):
    monkeypatch.setattr(log, "_logged", set())

    class OneHot(Own):
        def call(self, x):
            return tf.repeat(self.used(x), 4, axis=1)

        def train_step(self, data):
            x, y = data
            labels = tf.one_hot(tf.cast(y[:, 0], tf.int32), 4)
            return self.compute_metrics(x, labels, self(x))

    model = OneHot()
    model.compile(keras.optimizers.SGD(), "mse", metrics=["accuracy"])
    Builder(by_trace if can_be_traced else fails).build(model, "train_step", BATCH)
    (metric,) = model._compile_metrics.metrics
    one_hot, sparse = keras.metrics.CategoricalAccuracy, keras.metrics.SparseCategoricalAccuracy
    assert type(metric) is (one_hot if can_be_traced else sparse)
    assert len([one for one in model.metrics if one.name == "compile_metrics"]) == 1


def test_nothing_built_is_the_error_of_the_step():
    with pytest.raises(ValueError, match="no graph of this step"):
        built(Own(has_call=False), fails)


def test_a_variable_that_cannot_be_made_is_its_own_error():
    def refuse(shape, dtype=None):
        raise ValueError("no such values")

    model = Own()
    model.used = keras.layers.Dense(1, kernel_initializer=refuse)
    with pytest.raises(ValueError, match="no such values"):
        built(model, fails)
    assert built(Own(), by_trace) == (True, True), "the next model met it"
