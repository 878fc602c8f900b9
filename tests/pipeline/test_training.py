"""Pipelines in this process, whose stages share its one device, beside plain Keras.

`tests/multi_process` trains on two devices, `test_processes.py` in processes.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.pipeline import startup
from keras_psplus.pipeline.base import schedule
from keras_psplus.pipeline.step import step_function
from keras_psplus.tf_internals import context
from tests import references

layers = keras.layers
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(50, 12).astype("float32"), RANDOM.randint(0, 3, 50)
TOKENS = RANDOM.randint(1, 40, (50, 9))
# Some of which are padding, 0.
PADDED = TOKENS * (RANDOM.rand(*TOKENS.shape) < 0.7)


@pytest.fixture
def pipeline(monkeypatch):
    """Makes a strategy with some stages."""

    def make(count=2, **options):
        monkeypatch.setattr(startup, "local_devices", lambda: [CPU] * count)
        return psp.PipelineStrategy(**options)

    return make


def skips():
    inputs = keras.Input((12,))
    first = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    second = layers.Dense(8)(layers.LayerNormalization()(first))
    third = layers.Dense(8, activity_regularizer="l2")(layers.Add()([first, second]))
    return keras.Model(inputs, layers.Dense(3)(layers.Concatenate()([third, inputs]))), X


def shared():
    twice = layers.Dense(12, activation="tanh")
    stack = [twice, layers.Dense(12), twice, layers.Dense(3)]
    inputs = outputs = keras.Input((12,))
    for layer in stack:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs), X


class Tied(keras.Model):
    """Uses a table again, in another layer's place, and adds up between layers."""

    def __init__(self):
        super().__init__()
        self.table, self.hidden = layers.Embedding(40, 8), layers.Dense(8, activation="relu")
        self.out = layers.Dense(3)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        h = self.table(x)
        h = tf.nn.relu(h) + self.hidden(h) * self.scale
        scores = keras.ops.matmul(h, keras.ops.transpose(self.table.embeddings))
        return self.out(keras.ops.mean(scores, 1))


class AddsLoss(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(12)

    def call(self, x):
        h = self.dense(x)
        self.add_loss(0.1 * keras.ops.mean(h**2))
        return h


def losses_of_layers():
    return keras.Sequential([AddsLoss(), layers.Dense(8), AddsLoss(), layers.Dense(3)]), X


def masks():
    stack = [
        layers.Embedding(40, 8, mask_zero=True),
        layers.SimpleRNN(16, return_sequences=True),
        layers.SimpleRNN(8),
        layers.Dense(3),
    ]
    return keras.Sequential(stack), PADDED


def attention():
    inputs = keras.Input((9,), dtype="int32")
    h = layers.Embedding(40, 16)(inputs)
    attended = layers.MultiHeadAttention(2, 8)(h, h, use_causal_mask=True)
    h = layers.LayerNormalization()(layers.Add()([h, attended]))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h))), TOKENS


def nested():
    inner = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8)], name="inner")
    inputs = keras.Input((12,))
    return keras.Model(inputs, layers.Dense(3)(inner(inputs))), X


MODELS = [skips, shared, lambda: (Tied(), TOKENS), losses_of_layers, masks, attention, nested]
NAMES = ["skips", "shared", "tied", "losses_of_layers", "masks", "attention", "nested"]


def train(
    strategy, make, loss=CROSSENTROPY, y=Y, metrics=("accuracy",), jit_compile="auto", **options
):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, x = make()
        # Not Adam: of a gradient that is 0 but for rounding, it makes a step of full length.
        optimizer = keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=1.0)
        model.compile(optimizer, loss, metrics=metrics, jit_compile=jit_compile)
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False, **options}
    history = model.fit(x, y, validation_data=(x[:5], y[:5]), **options).history
    return model, history, model.predict(x, batch_size=16, verbose=0)


def check_equal(found, expected):
    for key, values in expected[1].items():
        np.testing.assert_allclose(found[1][key], values, rtol=2e-5, atol=2e-5, err_msg=key)
    for own, other in zip(found[0].get_weights(), expected[0].get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found[2], expected[2], rtol=2e-5, atol=5e-5)


@pytest.fixture(scope="module")
def alone():
    """Plain Keras's results, by model."""
    results = {}

    def get(make):
        if make not in results:
            results[make] = train(tf.distribute.get_strategy(), make)
        return results[make]

    with psp.single_process(), references.built_first():
        yield get


# Each by one schedule; `test_recompute.py` trains it by the other one.
TURNS = itertools.cycle(reversed(schedule.SCHEDULES))


@pytest.mark.parametrize("make, name", list(zip(MODELS, TURNS)), ids=NAMES)
def test_equals_plain_keras(make, name, alone, pipeline):
    check_equal(train(pipeline(2, microbatches=3, schedule=name), make), alone(make))


def test_masked_losses_are_divided_by_all_entries(pipeline, caplog):
    def make():
        recurrent = layers.SimpleRNN(8, return_sequences=True)
        stack = [layers.Embedding(40, 8, mask_zero=True), recurrent]
        return keras.Sequential([*stack, layers.Dense(40)]), PADDED

    with psp.single_process():
        expected = train(tf.distribute.get_strategy(), make, y=TOKENS)
    found = train(pipeline(2, schedule="1f1b"), make, y=TOKENS)
    check_equal(found, expected)
    assert 'trained by schedule "gpipe" instead of "1f1b": its outputs have masks' in caplog.text


@pytest.mark.parametrize(
    "name, reduction",
    [("gpipe", "sum"), ("1f1b", "mean_with_sample_weight"), ("gpipe", "sum_over_batch_size")],
)
def test_every_reduction_with_weights(name, reduction, pipeline):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    options = {"sample_weight": np.linspace(0, 2, 50), "loss": loss}
    with psp.single_process():
        expected = train(tf.distribute.get_strategy(), skips, **options)
    check_equal(train(pipeline(3, microbatches=5, schedule=name), skips, **options), expected)


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


def test_of_fewer_rows_than_microbatches_each_is_one(pipeline):
    model, _, predicted = train(pipeline(2, microbatches=8), skips, batch_size=4)
    np.testing.assert_allclose(predicted, model.predict(X, batch_size=3, verbose=0), atol=1e-5)


def test_a_train_step_of_ones_own_sees_the_batch(pipeline, caplog):
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            grads, norm = tf.clip_by_global_norm(grads, 0.3)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
            return {"loss": loss, "norm": norm}

    def make():
        return Own([layers.Dense(8, activation="tanh"), layers.Dense(3)]), X

    with psp.single_process():
        expected = train(tf.distribute.get_strategy(), make, metrics=None)
    check_equal(train(pipeline(2, schedule="1f1b"), make, metrics=None), expected)
    assert "it has its own `train_step`" in caplog.text


def two_outputs():
    inputs = keras.Input((12,))
    h = layers.Dense(8, activation="tanh")(inputs)
    outputs = {name: layers.Dense(3, name=name)(h) for name in ("a", "b")}
    return keras.Model(inputs, outputs), X


def test_losses_of_each_output(pipeline):
    targets = {"a": Y, "b": (Y + 1) % 3}

    def run(strategy):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model, _ = two_outputs()
            model.compile("sgd", dict.fromkeys(targets, CROSSENTROPY))
        data = tf.data.Dataset.from_tensor_slices((X, targets)).batch(16)
        return model.fit(data, epochs=2, verbose=0).history

    with psp.single_process():
        expected = run(tf.distribute.get_strategy())
    found = run(pipeline(2, microbatches=3, schedule="1f1b"))
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=2e-5, err_msg=key)


def of_rows(y, p):
    return tf.reduce_sum((tf.one_hot(tf.cast(y, "int32"), 3) - p) ** 2)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return of_rows(y, y_pred) / 100 + tf.reduce_sum(tf.reduce_mean(y_pred, 0) ** 2)


@pytest.mark.parametrize("model, loss", [(keras.Sequential, of_rows), (OwnLoss, "mse")])
def test_losses_that_may_compare_rows_see_the_batch(model, loss, pipeline, caplog):
    def make():
        return model([layers.Dense(8, activation="tanh"), layers.Dense(3)]), X

    with psp.single_process():
        expected = train(tf.distribute.get_strategy(), make, loss, metrics=None)
    check_equal(train(pipeline(2, schedule="1f1b"), make, loss, metrics=None), expected)
    assert 'by schedule "gpipe" instead of "1f1b"' in caplog.text


class Mixes(keras.Model):
    """Calls its layers with tensors whose number of rows nobody knows."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(3)])

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        both, some = tf.concat([x, -x], 0), tf.boolean_mask(x, x[:, 0] > 0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.inner(both) ** 2) + tf.reduce_mean(self.inner(some))
            loss += self.compute_loss(x, y, self(x))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.parametrize("drops", [False, True])
def test_calls_with_other_numbers_of_rows_lose_none(drops, pipeline):
    def run(strategy):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Mixes()
            model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=drops)
        history = model.fit(data, epochs=2, verbose=0).history
        return model, history, model.predict(X, verbose=0)

    with psp.single_process():
        expected = run(tf.distribute.get_strategy())
    check_equal(run(pipeline(2, microbatches=3)), expected)


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
        train(pipeline(3), lambda: (keras.Sequential([layers.Dense(4), layers.Dense(3)]), X))


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
    train(strategy, lambda: (keras.Sequential([layers.Dense(64), layers.Dense(3)]), X))
    first, second = strategy.plan.stages
    assert (first.layers, second.layers) == (("dense",), ("dense_1",))
    assert (first.parameters, second.parameters) == (12 * 64 + 64, 64 * 3 + 3)
    assert first.memory == 4 * first.parameters
    # Of a row: 64 floats; a product and an addition for each weight, in three passes.
    assert first.sent == 4 * 64
    assert first.flops == pytest.approx(3 * 2 * 12 * 64, rel=0.2)
    assert strategy.plan.bubble == 1 / 4
    assert "'sequential" in str(strategy.plan)


@pytest.mark.parametrize("order", ["1f1b", "pipedream"])
def test_what_a_callback_writes_is_there_before_the_next_step(pipeline, monkeypatch, order):
    """On another process's device, an eager assignment is sent, and may come after the step."""
    events, strategy = [], pipeline(schedule=order)
    made_with = strategy.engine.context
    finish = made_with.finish_writes
    monkeypatch.setattr(
        context.context(), "sync_executors", lambda: events.append("sync"), raising=False
    )

    def finish_writes():
        events.append("about to run")
        finish()

    monkeypatch.setattr(made_with, "finish_writes", finish_writes)

    class Writes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.set_weights(self.model.get_weights())
            events.append("written")

    train(strategy, skips, callbacks=[Writes()])
    written = [i for i, event in enumerate(events) if event == "written"]
    assert len(written) == 8
    for i in written:
        next_step = events.index("about to run", i)
        assert events[next_step + 1] == "sync"


def test_a_loss_that_ignores_a_class_sees_whole_batches(pipeline):
    def make():
        stack = [layers.Embedding(40, 8), layers.Dense(8), layers.Dense(4)]
        return keras.Sequential(stack), TOKENS[:21]

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    options = dict(loss=loss, y=TOKENS[:21] % 4, metrics=(), batch_size=8)
    expected = train(tf.distribute.get_strategy(), make, **options)
    check_equal(train(pipeline(schedule="1f1b", microbatches=4), make, **options), expected)


@pytest.mark.parametrize("count", [1, 2])
def test_states_of_rows_are_refused(pipeline, count):
    with pipeline(microbatches=count).scope():
        inputs = keras.Input(batch_shape=(16, 9), dtype="int32")
        h = layers.GRU(8, stateful=True)(layers.Embedding(40, 8)(inputs))
        model = keras.Model(inputs, layers.Dense(3)(h))
        with pytest.raises(ValueError, match="'gru.*' is stateful.*to micro-batches.*Received"):
            model.compile("sgd", CROSSENTROPY)


class Adversarial(keras.Model):
    """Two models, two optimizers, nothing built, and no `call`."""

    def __init__(self):
        super().__init__()
        self.made = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(12)])
        self.judge = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])
        self.of_made = keras.optimizers.SGD(0.02, momentum=0.5)

    def train_step(self, x):
        for real, optimizer, model in (
            (0.0, self.optimizer, self.judge),
            (1.0, self.of_made, self.made),
        ):
            with tf.GradientTape() as tape:
                scores = self.judge(self.made(x[:, :3]))
                loss = tf.reduce_mean((scores - real) ** 2 + (self.judge(x) - 1.0) ** 2)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class OnGraph(keras.Model):
    """Calls its layers with a tensor of its own, which no step has made."""

    def __init__(self):
        super().__init__()
        self.nodes = tf.constant(X[:9])
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(tf.gather(self.hidden(self.nodes), tf.cast(x[:, 0] > 0, tf.int32)))


@pytest.mark.parametrize("make", [Adversarial, OnGraph])
def test_models_whose_layers_are_not_called_with_the_batch(pipeline, make):
    def history(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = make()
            # Small steps: two models that work against each other magnify rounding.
            model.compile(keras.optimizers.SGD(0.01), CROSSENTROPY)
        data = (X,) if make is Adversarial else (X, Y)
        options = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
        return model.fit(*data, **options).history["loss"], model.get_weights()

    loss, weights = history(tf.distribute.get_strategy())
    found_loss, found = history(pipeline(schedule="1f1b"))
    np.testing.assert_allclose(found_loss, loss, rtol=2e-6)
    for own, other in zip(found, weights, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-6, atol=2e-6)
