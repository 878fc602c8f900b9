"""Layers that are measured: what they are measured with, and what that leaves alone."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.pipeline import costs, plan, splitter
from keras_psplus.pipeline.costs import Times
from tests.pipeline.models import CPU, Task, X, Y, layers, train

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def small_models_are_measured(monkeypatch):
    monkeypatch.setattr(splitter, "_LEAST_FLOPS", 0.0)
    monkeypatch.setattr(splitter, "_REPEATED", 0.001)
    monkeypatch.setattr(splitter, "_BUDGET", 300.0)


def costs_of(strategy, make, spec):
    with strategy.scope():
        return costs.of_layers(strategy.engine, make(), spec).layers


class Slow(layers.Layer):
    """A loop of whose steps the graph does not tell how many there are."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        steps = tf.random.stateless_uniform([], [1, 2], 2000, 2001, tf.int32)
        return tf.while_loop(
            lambda i, h: i < steps, lambda i, h: (i + 1, tf.matmul(h, self.kernel)), (0, x)
        )[1]


def test_a_slow_layer_moves_the_cut(pipeline):
    def cut(stages):
        strategy = pipeline(2, stages=stages)
        with strategy.scope():
            stack = [layers.Dense(size) for size in (1024, 1024, 128)]
            model = keras.Sequential([*stack, Slow()])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        model.predict(np.zeros((32, 128), "float32"), verbose=0)
        return strategy.plan

    counted, found = cut("flops"), cut("auto")
    assert [len(stage.layers) for stage in counted.stages] == [2, 2]
    assert [len(stage.layers) for stage in found.stages] == [3, 1]
    assert counted.milliseconds is None
    assert found.milliseconds > found.stages[1].milliseconds > found.stages[0].milliseconds > 0
    assert "ms a step" in str(found)
    assert "ms a step" not in str(counted)


@pytest.mark.extended
def test_names_and_seeds_are_those_of_the_script(pipeline, monkeypatch):
    class Draws(layers.Layer):
        """Makes a layer, and draws, where it should not."""

        def call(self, x):
            layers.Dense(3)
            return x * random.random() * float(np.random.rand())

    def make():
        stack = [layers.Dense(24), layers.BatchNormalization(), layers.Dropout(0.3), Draws()]
        return Task(keras.Sequential([*stack, layers.Dense(3)]))

    def run(stages):
        model, history, _ = train(pipeline(2, stages=stages), make)
        with pipeline(1).scope():
            later = layers.Dense(2)
            later.build((None, 4))
        drawn = random.random(), np.random.rand()
        return model, history, later.name, later.get_weights(), drawn

    timed = []
    of_call = splitter.time_layer_call
    monkeypatch.setattr(
        splitter, "time_layer_call", lambda *args: timed.append(args) or of_call(*args)
    )
    # What is measured differs from run to run.
    monkeypatch.setattr(plan, "balance", lambda times, *_: [0, 0, 1, 1, 1])
    counted = run("flops")
    assert not timed
    found = run("auto")
    assert len(timed) == 5
    assert found[1] == counted[1]
    assert found[2] == counted[2]
    assert found[4] == counted[4]
    for own, other in zip([*found[0].weights], [*counted[0].weights], strict=True):
        assert own.path == other.path
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    np.testing.assert_array_equal(found[3][0], counted[3][0])


def kinds_of_layers():
    inputs = keras.Input((9,), dtype="int32")
    h = layers.Embedding(40, 16, mask_zero=True)(inputs)
    h = layers.LSTM(16, return_sequences=True, dropout=0.1)(h)
    h = layers.Add()([h, layers.MultiHeadAttention(2, 8, dropout=0.1)(h, h)])
    h = layers.Bidirectional(layers.GRU(8))(layers.LayerNormalization()(h))
    return keras.Model(inputs, layers.Dense(3, kernel_regularizer="l2")(h))


@pytest.mark.extended
def test_layers_of_every_kind_are_measured(pipeline, caplog):
    found = costs_of(pipeline(2), kinds_of_layers, tf.TensorSpec([None, 9], tf.int32))
    times = splitter.measured(found, 8, CPU)
    assert len(times) == len(found) == 7
    assert all(one.total > 0 for one, cost in zip(times, found) if cost.flops > 1e4)
    assert "could not be measured" not in caplog.text
    # Nothing was made for that.
    assert all(v._value is None for cost in found for v in cost.layer.trainable_variables)


def test_layers_that_are_alike_are_measured_once(pipeline, monkeypatch):
    timed = []

    def of_call(layer, call, rows, device):
        timed.append((layer.name, rows, device))
        return Times(1.0, 2.0)

    monkeypatch.setattr(splitter, "time_layer_call", of_call)

    def make():
        return keras.Sequential([layers.Dense(12) for _ in range(9)] + [layers.Dense(3)])

    found = costs_of(pipeline(2), make, tf.TensorSpec([None, 12]))
    assert splitter.measured(found, 7, CPU) == [Times(1.0, 2.0)] * 10
    # The first needs no gradient by its input.
    assert [(rows, device) for _, rows, device in timed] == [(7, CPU)] * 3


def test_a_layer_that_cannot_be_measured_is_counted(pipeline, monkeypatch, caplog):
    class Writes(layers.Layer):
        def call(self, x):
            tf.print("writes")
            return tf.numpy_function(lambda a: a, [x], tf.float32)

    with pytest.raises(splitter.CannotBeTimed, match=r"effects.*Received: "):
        form = costs.TensorForm((32, 4), "float32", False, True)
        splitter.time_layer_call(Writes(), costs.LayerCall((form,), {}, 32), 8, CPU)

    def of_call(layer, *args):
        if layer.units == 6:
            raise ValueError("out of luck")
        return Times(3.0, 5.0)

    monkeypatch.setattr(splitter, "time_layer_call", of_call)
    found = costs_of(
        pipeline(2),
        lambda: keras.Sequential([layers.Dense(12), layers.Dense(6)]),
        tf.TensorSpec([None, 12]),
    )
    first, second = splitter.measured(found, 8, CPU)
    assert first == Times(3.0, 5.0)
    assert second == pytest.approx((1.5, 2.5), rel=0.1)
    assert "could not be measured" in caplog.text
    assert "out of luck" in caplog.text
    monkeypatch.setattr(splitter, "_BUDGET", -1.0)
    assert splitter.measured(found, 8, CPU) is None
    assert "are over" in caplog.text


def test_weights_that_are_drawn_in_the_graph_are_not_work(pipeline):
    def make():
        return keras.Sequential([layers.Embedding(100_000, 8), layers.Flatten(), layers.Dense(3)])

    first, *_ = costs_of(pipeline(2), make, tf.TensorSpec([None, 9], tf.int32))
    assert first.flops < 1000


@pytest.mark.parametrize(
    "optimizer, slots",
    [
        (None, None),
        (keras.optimizers.SGD(), 0),
        (keras.optimizers.SGD(momentum=0.9), 1),
        (keras.optimizers.Adam(), 2),
        (keras.optimizers.AdamW(amsgrad=True), 3),
        (keras.optimizers.RMSprop(momentum=0.5, centered=True), 3),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion()), 1),
        (keras.optimizers.Adam(gradient_accumulation_steps=2), 3),
    ],
)
def test_slots_of_optimizers(optimizer, slots):
    assert costs.slots_of(optimizer) == slots


def test_memory_in_the_plan(pipeline):
    strategy = pipeline(2, microbatches=4, schedule="1f1b", stages="flops")

    def make():
        return Task(keras.Sequential([layers.Dense(64, activation="relu"), layers.Dense(3)]))

    train(strategy, make, evaluates=False, batch_size=16)
    first, second = (stage.estimate for stage in strategy.plan.stages)
    assert first.weights == first.gradients == first.slots == 4 * (12 * 64 + 64)
    # The first keeps its input and its output, the second what it has received; 4 rows in each.
    assert first.activations == 4 * (12 + 64) * 4 * 2
    assert second.activations == 4 * 64 * 4 * 1
    assert strategy.plan.rows == 16
    assert strategy.plan.schedule == "1f1b"
    assert 0 < strategy.plan.expected_bubble < 1


def test_rows_of_data(pipeline):
    for data in (
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(24).map(lambda x, y: (x, y)).prefetch(1),
        keras.utils.PyDataset,
    ):
        strategy = pipeline(2, stages="flops")
        with strategy.scope():
            model = keras.Sequential([layers.Dense(4), layers.Dense(3)])
            model.compile("sgd", "mse")
        if data is keras.utils.PyDataset:
            model.train_on_batch(X[:20], X[:20, :3])
            assert strategy.plan.rows == 20
        else:
            model.fit(data.map(lambda x, y: (x, x[:, :3])), verbose=0)
            assert strategy.plan.rows == 24
