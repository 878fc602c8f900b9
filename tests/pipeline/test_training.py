"""Pipelines in this process, whose stages share its one device, beside plain Keras.

`tests/multi_process` trains on two and on four devices, `test_processes.py` in processes.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.pipeline import schedule, step_function
from tests.pipeline import models
from tests.pipeline.models import CROSSENTROPY, RANDOM, Task, X, Y, check_equal, layers, train
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

# Each model by one schedule, kept, recomputed or compiled, in one pipeline or in two.
GPIPE, RECOMPUTED, COMPILED, TWO = "gpipe", "recomputed", "compiled", "two pipelines"
# What evaluates and predicts, too; all do of those that `make test-all` adds.
EVALUATED = "evaluated"
WAYS = [
    ("own_step", TWO, EVALUATED),
    ("loss_of_rows",),
]
MORE_WAYS = [
    ("tied", TWO, GPIPE, EVALUATED),
    ("mean_with_sample_weight", EVALUATED),
    ("same_twice", COMPILED, GPIPE),
    ("frozen", TWO, RECOMPUTED),
    ("other_numbers_of_rows",),
    ("ignored_class",),
    ("masks", COMPILED),
    ("skips", RECOMPUTED, TWO),
    ("on_graph",),
    ("masked_losses",),
]
# Why the batch is trained whole, or by the other schedule.
SAID = {
    "own_step": "it has its own `train_step`",
    "masked_losses": 'schedule "gpipe" instead of "1f1b": its outputs have masks',
    "loss_of_rows": 'by schedule "gpipe" instead of "1f1b"',
}


@pytest.mark.parametrize("way", [*WAYS, *extended(*((way,) for way in MORE_WAYS))], ids="-".join)
def test_equals_plain_keras(way, alone, pipeline, counted, caplog):
    name, *ways = way
    make = getattr(models, name)
    options = {"assigns": TWO in ways, "evaluates": way in MORE_WAYS or EVALUATED in ways}
    strategy = pipeline(
        microbatches=2 if TWO in ways else 3,
        schedule="gpipe" if GPIPE in ways else "1f1b",
        recompute=RECOMPUTED in ways,
        pipelines=2 if TWO in ways else 1,
    )
    found = train(strategy, make, True if COMPILED in ways else "auto", **options)
    check_equal(found, alone(make, **options))
    assert SAID.get(name, "") in caplog.text
    if COMPILED in ways:
        # Those of the last function: of predict, whose last batch has two rows, or of the step.
        calls, functions, _ = counted.found
        assert calls >= 2 and functions <= calls


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_stages_do_what_the_schedule_says(name, pipeline, monkeypatch):
    steps = []

    class Recorded(step_function.PipelineStep):
        def __init__(self, *args):
            super().__init__(*args)
            steps.append(self)

    monkeypatch.setattr(step_function, "PipelineStep", Recorded)
    stack = [layers.Dense(12) for _ in range(6)]
    strategy = pipeline(3, microbatches=5, schedule=name)
    with strategy.scope():
        model = keras.Sequential(stack)
        model.compile("sgd", "mse")
    model.fit(X[:40], X[:40], batch_size=40, verbose=0)
    assert [len(stage.layers) for stage in strategy.plan.stages] == [2, 2, 2]
    for traced, actions in zip(steps[0].traced, schedule.SCHEDULES[name](3, 5)):
        for direction in (schedule.FORWARD, schedule.BACKWARD):
            own = [action for action in actions if action[0] == direction]
            assert [action for action in traced if action[0] == direction] == own
        # Operations wait for what was traced before: it must be there.
        for action in actions:
            for other in schedule.before(actions)[action]:
                assert traced.index(other) < traced.index(action)


@pytest.mark.extended
def test_of_fewer_rows_than_microbatches_each_is_one(pipeline):
    model, _, predicted = train(pipeline(2, microbatches=8), models.nested, batch_size=4, epochs=1)
    np.testing.assert_allclose(predicted, model.predict(X, batch_size=3, verbose=0), atol=1e-5)


@pytest.mark.extended
def test_an_optimizer_that_is_built_before_trains_as_well(pipeline, tmp_path):
    def run(strategy):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((12,)), layers.Dense(8), layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.2, momentum=0.9), CROSSENTROPY)
            model.optimizer.build(model.trainable_variables)
        history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
        return model, history, model.predict(X, verbose=0)

    with psp.single_process():
        model, *_ = expected = run(tf.distribute.get_strategy())
        model.save(tmp_path / "compiled.keras")
        check_equal(run(pipeline(2)), expected)
        again = model.fit(X, Y, batch_size=16, verbose=0, shuffle=False).history
    with pipeline(2).scope():
        loaded = keras.models.load_model(tmp_path / "compiled.keras")
    history = loaded.fit(X, Y, batch_size=16, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], again["loss"], rtol=2e-5)


def test_parts_of_a_model_predict_where_it_was_trained(pipeline):
    strategy = pipeline(2, stages=[["first*"], ["last*"]])
    with strategy.scope():
        inputs = keras.Input((12,))
        h = layers.Dense(8, name="first")(inputs)
        model = keras.Model(inputs, layers.Dense(3, name="last")(h))
        part = keras.Model(inputs, h)
        model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
    model.fit(X, Y, verbose=0)
    kernel, bias = part.get_weights()
    np.testing.assert_allclose(part.predict(X, verbose=0), X @ kernel + bias, atol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), model(X), atol=1e-5)


def test_a_model_of_fewer_layers_than_stages_predicts(pipeline):
    with pipeline(3).scope():
        model = keras.Sequential([layers.Dense(3)])
    np.testing.assert_allclose(model.predict(X, verbose=0), model(X), atol=1e-5)


def test_ragged_outputs_are_refused(pipeline):
    class Ragged(layers.Layer):
        def call(self, x):
            return tf.RaggedTensor.from_tensor(x)

    with pipeline(2).scope():
        model = keras.Sequential([layers.Dense(4), Ragged()])
    with pytest.raises(ValueError, match="must return dense tensors.*Received: "):
        model.predict(X, verbose=0)


def test_more_stages_than_layers_are_refused(pipeline):
    with pytest.raises(ValueError, match=r"of 2 layer\(s\) cannot be cut into 3 stages"):
        train(pipeline(3), models.small)


def test_a_model_that_returns_no_rows_is_refused(pipeline):
    class Mean(layers.Layer):
        def call(self, x):
            return keras.ops.mean(x)

    with pipeline(2).scope():
        model = keras.Sequential([layers.Dense(4), Mean()])
    with pytest.raises(ValueError, match="The layer '.*' is called with micro-batches.*Received"):
        model.predict(X, verbose=0)


def test_weights_that_are_set_before_training_are_trained(pipeline):
    strategy = pipeline(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), layers.Dense(4), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.0), CROSSENTROPY)
    weights = [RANDOM.randn(*v.shape).astype("float32") for v in model.weights]
    model.set_weights(weights)
    model.fit(X, Y, verbose=0)
    for own, other in zip(model.get_weights(), weights):
        np.testing.assert_array_equal(own, other)


def test_the_plan_says_what_it_comes_to(pipeline):
    strategy = pipeline(2, microbatches=3)

    def make():
        return Task(keras.Sequential([layers.Dense(64), layers.Dense(3)]))

    train(strategy, make, evaluates=False)
    first, second = strategy.plan.stages
    assert (first.layers, second.layers) == (("dense",), ("dense_1",))
    assert (first.parameters, second.parameters) == (12 * 64 + 64, 64 * 3 + 3)
    assert first.memory == 4 * first.parameters
    # Of a row: 64 floats; a product and an addition for each weight, in three passes.
    assert first.sent == 4 * 64
    assert first.flops == pytest.approx(3 * 2 * 12 * 64, rel=0.2)
    assert strategy.plan.bubble == 1 / 4
    assert "'sequential" in str(strategy.plan)


@pytest.mark.parametrize("count", [1, 2])
def test_states_of_rows_are_refused(pipeline, count):
    with pipeline(microbatches=count).scope():
        inputs = keras.Input(batch_shape=(16, 9), dtype="int32")
        h = layers.GRU(8, stateful=True)(layers.Embedding(40, 8)(inputs))
        model = keras.Model(inputs, layers.Dense(3)(h))
        with pytest.raises(ValueError, match="'gru.*' is stateful.*to micro-batches.*Received"):
            model.compile("sgd", CROSSENTROPY)
