"""Steps that need more than a worker has: as in one process, or refused by name."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster import equals_one_process, run
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


class Averaged(keras.Sequential):
    """A model with a moving average of its kernel, as teachers have."""

    def __init__(self, when):
        super().__init__([keras.Input((3,)), keras.layers.Dense(2)])
        self.when = when
        initial = dict(initializer="zeros", trainable=False)
        self.average = self.add_weight(name="average", shape=(3, 2), **initial)

    def move(self):
        self.average.assign(0.9 * self.average + 0.1 * self.layers[0].kernel)

    def train_step(self, data):
        if self.when == "before":
            self.move()
        logs = super().train_step(data)
        if self.when == "after":
            self.move()
        if self.when == "in a function":
            tf.function(self.move)()
        logs["iterations"] = keras.ops.cast(self.optimizer.iterations, "float32")
        logs["rate"] = self.optimizer.learning_rate
        return logs


class Two(keras.Sequential):
    """Trains its layers by optimizers of their own, together or one after the other."""

    def __init__(self, together):
        super().__init__([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        self.together = together
        self.first, self.second = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)

    def train_step(self, data):
        x, y = data
        parts = [layer.trainable_variables for layer in self.layers]
        for optimizer, part in zip((self.first, self.second), parts):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            part = parts[0] + parts[1] if self.together else part
            gradients = tape.gradient(loss, part)
            if self.together:
                self.first.apply(gradients[:2], parts[0])
                self.second.apply(gradients[2:], parts[1])
                break
            optimizer.apply(gradients, part)
        return {"loss": loss}


def fitted(model, callbacks=()):
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model.compile(keras.optimizers.SGD(rate, momentum=0.5), "mse")
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    options = dict(batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model, model.fit(x, x[:, :2], callbacks=list(callbacks), **options).history


def averaged(when):
    model, callbacks = Averaged(when), []
    if when == "in a callback":
        moves = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: model.move())
        callbacks = [moves]
    model, history = fitted(model, callbacks)
    return model, {name: history[name] for name in ("iterations", "rate")}


def of_two(together):
    model, _ = fitted(Two(together))
    return model, {}


def refused(name, **args):
    with pytest.raises(ValueError, match="after it has applied gradients") as error:
        (averaged if name == "averaged" else of_two)(**args)
    return {"message": str(error.value)}


class Halved(keras.optimizers.SGD):
    """Changes gradients where they are applied, or where a variable is updated."""

    def __init__(self, in_apply):
        super().__init__(0.1)
        self.in_apply = in_apply

    def apply(self, grads, trainable_variables=None):
        grads = [gradient / 2 for gradient in grads] if self.in_apply else grads
        super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        gradient = gradient if self.in_apply else gradient / 2
        super().update_step(gradient, variable, learning_rate)


def halved(in_apply):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(Halved(in_apply), "mse")
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0)
    return model, {}


def changed_in_apply():
    with pytest.raises(ValueError, match=r"update_step(.|\n)*Received: Halved.apply\(\)") as error:
        halved(True)
    return {"message": str(error.value)}


class Counting(keras.Sequential):
    """Counts steps, in a weight of its own or in a variable beside the layers."""

    def __init__(self, is_weight):
        super().__init__([keras.Input((3,)), keras.layers.Dense(2)])
        options = {"name": "count", "shape": (), "initializer": "zeros", "trainable": False}
        self.count = self.add_weight(**options) if is_weight else keras.Variable(**options)

    def train_step(self, data):
        self.count.assign_add(1.0)
        return super().train_step(data)


def counted(is_weight):
    model, _ = fitted(Counting(is_weight))
    return model, {"count": np.asarray(model.count)}


def refused_count():
    with pytest.raises(ValueError, match=r"each would write(.|\n)*writes to count$"):
        counted(is_weight=False)
    return {}


def test_a_step_is_counted_once_or_refused():
    equals_one_process("sync_threads", counted, is_weight=True)
    run("sync_threads", refused_count, may_show_errors=True)


class Positive(keras.layers.Layer):
    """Masks what is not positive."""

    supports_masking = True

    def compute_mask(self, inputs, mask=None):
        return inputs[..., 0] > 0

    def call(self, inputs):
        return inputs


def masked(by_weights):
    layers = [keras.Input((3, 2)), Positive(), keras.layers.Dense(2)]
    model = keras.Sequential([layers[0], *layers[1 + by_weights :], *layers[1 : 1 + by_weights]])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(20, 3, 2)).astype("float32")
    history = model.fit(x, x, batch_size=7, epochs=2, shuffle=False, verbose=0).history
    return model, {"loss": history["loss"]}


def refused_mask():
    with pytest.raises(ValueError, match="the chief computes before the workers begin") as error:
        masked(by_weights=True)
    return {"message": str(error.value)}


def test_masks_count_in_the_whole_batch_or_are_refused():
    equals_one_process("sync_threads", masked, by_weights=False)
    message = str(run("sync_threads", refused_mask, may_show_errors=True).first["message"])
    # Of the kernel, which is read alone or with others.
    assert re.search(r"with what (Identity|EnsureShape) |ReadVariableOp", message), message


class Compiled(keras.layers.Dense):
    """A layer that has XLA compile its call."""

    @tf.function(jit_compile=True)
    def call(self, x):
        return super().call(x)


def refused_compilation():
    model = keras.Sequential([keras.Input((2,)), Compiled(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="take the argument off, or read the"):
        model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    return {}


def test_what_xla_compiles_reads_no_servers():
    run("sync_threads", refused_compilation, may_show_errors=True)


def test_gradients_are_changed_in_the_optimizer_s_update():
    equals_one_process("sync_threads", halved, in_apply=False)
    run("sync_threads", changed_in_apply, may_show_errors=True)


@pytest.mark.parametrize(
    "layout, when",
    [
        ("sync_threads", "before"),
        ("sync_sharded", "in a callback"),
        *extended(("sync22", "in a callback")),
    ],
)
def test_averages_of_weights_equal_one_process(layout, when):
    equals_one_process(layout, averaged, when=when)


@pytest.mark.parametrize(
    "layout, when",
    [
        ("sync_sharded", "after"),
        ("sync_threads", "in a function"),
        *extended(("sync22", "after")),
    ],
)
def test_averages_of_weights_that_have_not_come_are_refused(layout, when):
    args = {"name": "averaged", "when": when}
    message = str(run(layout, refused, may_show_errors=True, **args).first["message"])
    assert "dense/kernel, read after sgd.apply()" in message


def test_two_optimizers_whose_gradients_are_taken_together_equal_one_process():
    equals_one_process("sync_threads", of_two, together=True)


def test_two_optimizers_of_which_one_waits_for_the_other_are_refused():
    args = {"name": "two", "together": False}
    message = str(run("sync_threads", refused, may_show_errors=True, **args).first["message"])
    assert "read after adam.apply()" in message
