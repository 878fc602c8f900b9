"""Models that pipelines train beside plain Keras, and what they are trained with."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(50, 12).astype("float32"), RANDOM.randint(0, 3, 50)
TOKENS = RANDOM.randint(1, 40, (50, 9))
# Some of which are padding, 0.
PADDED = TOKENS * (RANDOM.rand(*TOKENS.shape) < 0.7)


class Task(NamedTuple):
    """A model, its data, and what `compile` and `fit` are given besides."""

    model: keras.Model
    x: Any = X
    y: Any = Y
    loss: Any = CROSSENTROPY
    metrics: Any = ("accuracy",)
    optimizer: Any = None
    options: Any = {}


class Assigns(keras.callbacks.Callback):
    """Changes a weight between two steps, and predicts."""

    def __init__(self, x):
        super().__init__()
        self._x = x

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            weight = self.model.trainable_variables[0]
            weight.assign(0.9 * weight.value)
            self.model.predict(self._x[:3], verbose=0)


def train(strategy, make, jit_compile="auto", assigns=False, evaluates=True, **options):
    """Trains a model.

    Args:
        strategy: The strategy.
        make: A function that returns a `Task`.
        jit_compile: For `compile`.
        assigns: Whether a callback changes a weight between two steps.
        evaluates: Whether it evaluates and predicts, too: functions to be traced.
        **options: For `fit`.

    Returns:
        The model, its history and what it predicts, or None.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        task = make()
        # Not Adam: of a gradient that is 0 but for rounding, it makes a step of full length.
        default = keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=1.0)
        optimizer = task.optimizer or default
        task.model.compile(optimizer, task.loss, metrics=task.metrics, jit_compile=jit_compile)
    model, x, y = task.model, task.x, task.y
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False, **options}
    options |= task.options
    if assigns:
        options["callbacks"] = [Assigns(x)]
    if evaluates:
        options["validation_data"] = keras.tree.map_structure(lambda rows: rows[:5], (x, y))
    history = model.fit(x, y, **options).history
    return model, history, model.predict(x, batch_size=16, verbose=0) if evaluates else None


def check_equal(found, expected):
    """Two results of `train` have the same histories, weights and predictions."""
    assert found[1].keys() == expected[1].keys()
    for key, values in expected[1].items():
        np.testing.assert_allclose(found[1][key], values, rtol=2e-5, atol=2e-5, err_msg=key)
    for own, other in zip(found[0].get_weights(), expected[0].get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5)
    predicted = keras.tree.flatten(found[2:]), keras.tree.flatten(expected[2:])
    for own, other in zip(*predicted, strict=True):
        if other is not None:
            np.testing.assert_allclose(own, other, rtol=2e-5, atol=5e-5)


def wide(optimizer=None):
    """A model with weights that are large enough to be compressed."""
    stack = [layers.Dense(48, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((12,)), *stack, layers.Dense(3)])
    return Task(model, optimizer=optimizer or keras.optimizers.SGD())


def skips():
    inputs = keras.Input((12,))
    first = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    second = layers.Dense(8, kernel_constraint="unit_norm")(layers.LayerNormalization()(first))
    third = layers.Dense(8, activity_regularizer="l2")(layers.Add()([first, second]))
    return Task(keras.Model(inputs, layers.Dense(3)(layers.Concatenate()([third, inputs]))))


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


def tied():
    return Task(Tied(), TOKENS)


def masks():
    """A mask goes from stage to stage, and to a loop, which XLA does not compile."""
    stack = [layers.Embedding(40, 8, mask_zero=True), layers.Dense(8, "tanh")]
    return Task(keras.Sequential([*stack, layers.SimpleRNN(8), layers.Dense(3)]), PADDED)


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
    return Task(Attends(), TOKENS)


def nested():
    inner = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8)], name="inner")
    inputs = keras.Input((12,))
    return Task(keras.Model(inputs, layers.Dense(3)(inner(inputs))))


class OwnStep(keras.Sequential):
    """Changes weights in the middle of a step, and calls the model again."""

    def train_step(self, data):
        x, y = data
        for factor in (1.0, 0.5):
            with tf.GradientTape() as tape:
                loss = factor * self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            grads, norm = tf.clip_by_global_norm(grads, 0.3)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss, "norm": norm}


def small(kind=keras.Sequential, **options):
    """A small model of some class."""
    return Task(kind([layers.Dense(8, activation="tanh"), layers.Dense(3)]), **options)


def own_step():
    return small(OwnStep, metrics=None)


class TargetStep(keras.Sequential):
    """Lets a frozen layer follow another, as reinforcement learning does."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.layers[1].kernel.assign(0.9 * self.layers[1].kernel + 0.1 * self.layers[0].kernel)
        return logs


def frozen():
    model = TargetStep([keras.Input((12,)), *(layers.Dense(12) for _ in range(3)), layers.Dense(3)])
    model.layers[1].trainable = model.layers[2].trainable = False
    return Task(model)


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


def other_numbers_of_rows():
    return Task(Mixes(), metrics=None)


class OnGraph(keras.Model):
    """Calls its layers with a tensor of its own, which no step has made."""

    def __init__(self):
        super().__init__()
        self.nodes = tf.constant(X[:9])
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(3)

    def call(self, x):
        return self.out(tf.gather(self.hidden(self.nodes), tf.cast(x[:, 0] > 0, tf.int32)))


def on_graph():
    return Task(OnGraph())


def masked_losses():
    """Its outputs have masks: losses are divided by all entries of the batch."""
    stack = [layers.Embedding(40, 8, mask_zero=True), layers.SimpleRNN(8, return_sequences=True)]
    return Task(keras.Sequential([*stack, layers.Dense(40)]), PADDED, TOKENS)


def weighted(reduction):
    """A model with weights of samples, and a loss by some reduction."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    weights = np.linspace(0, 2, 50)
    return skips()._replace(loss=loss, options={"sample_weight": weights})


def mean_with_sample_weight():
    return weighted("mean_with_sample_weight")


def ignored_class():
    stack = [layers.Embedding(40, 8), layers.Dense(8), layers.Dense(4)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    x, y = TOKENS[:21], TOKENS[:21] % 4
    return Task(keras.Sequential(stack), x, y, loss, metrics=None, options={"batch_size": 8})


def of_rows(y, p):
    return tf.reduce_sum((tf.one_hot(tf.cast(y, "int32"), 3) - p) ** 2)


def loss_of_rows():
    return small(loss=of_rows, metrics=None)


class Counts(layers.Layer):
    """Adds to a variable of its own at each call, and uses it."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1.0)
        return x * (1.0 + 0.01 * self.calls)


def stateful():
    """What depends on the order of micro-batches: no reference for one process."""
    stack = [layers.Dense(12), layers.BatchNormalization(momentum=0.7), layers.Dropout(0.3)]
    stack += [Counts(), layers.Dense(8, "tanh"), layers.GaussianNoise(0.1), layers.Dense(3)]
    return Task(keras.Sequential(stack))


def spectral():
    """The same, and weights that the forward pass changes."""
    stack = [layers.Dense(12, use_bias=False), layers.BatchNormalization(), layers.Dropout(0.3)]
    stack += [layers.SpectralNormalization(layers.Dense(8)), layers.Dense(3)]
    return Task(keras.Sequential(stack))
