"""Trains with several steps under way on each worker, and counts what comes out of them.

The chief of a cluster with two workers and two parameter servers.
"""

import os
import threading

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

BATCH, STEPS, BOUND = 8, 24, 1
rng = np.random.default_rng(0)
x = rng.normal(size=(BATCH * STEPS, 200)).astype("float32")
y = (x[:, :1] > 0).astype("float32")


def make(name, optimizer, **kwargs):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((200,)),
            keras.layers.Dense(300, activation="tanh"),
            keras.layers.Dropout(0.1, seed=5),
            keras.layers.Dense(1),
        ],
        name=name,
    )
    model.compile(optimizer, "mse", metrics=["mae"], **kwargs)
    return model


class UnderWay(keras.callbacks.Callback):
    """Looks, after each batch, at how many closures each worker has begun with."""

    def __init__(self, scheduler):
        super().__init__()
        self.scheduler, self.most, self.first_logs = scheduler, 0, []

    def on_train_batch_end(self, batch, logs=None):
        begun = [c.tried_on for c in self.scheduler.queue.closures if c.started is not None]
        self.most = max(self.most, *(begun.count(worker) for worker in range(2)))
        if batch == 0:
            self.first_logs.append(dict(logs))


def every_step_counts_once(strategy, compression):
    with strategy.scope():
        model = make("plain", keras.optimizers.SGD(0.01))
    under_way = UnderWay(strategy._context.scheduler)
    history = model.fit(x, y, batch_size=BATCH, epochs=5, verbose=0, callbacks=[under_way]).history
    assert int(model.optimizer.iterations.numpy()) == 5 * STEPS
    # The limit of staleness counts steps that are under way.
    assert under_way.most == BOUND + 1, under_way.most
    # Also the first batch of an epoch has logs, which name the same metrics.
    assert all(set(logs) == {"loss", "mae"} for logs in under_way.first_logs), under_way.first_logs
    assert history["loss"][-1] < 0.8 * history["loss"][0], history
    # Metrics are those of all rows: evaluated alone, they are within what weights have moved.
    assert abs(model.evaluate(x, y, verbose=0)[0] - history["loss"][-1]) < 0.2


def sums_of_gradients_are_not_shared(strategy, compression):
    """A worker's sum goes on from step to step, so its steps come one after the other."""
    with strategy.scope():
        model = make("sums", keras.optimizers.SGD(0.01, gradient_accumulation_steps=4))
    under_way = UnderWay(strategy._context.scheduler)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[under_way])
    assert under_way.most <= 1, under_way.most


def residuals_are_kept(strategy, compression):
    """With error feedback all that is not sent is kept: what arrives is the sum of gradients."""

    class Constant(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(256, 80), initializer="zeros", name="kernel")

        def call(self, inputs):
            return tf.reduce_mean(inputs, 1, keepdims=True)[:, :1] * 0 + tf.reduce_sum(
                self.kernel * pattern
            )

    pattern = tf.constant(rng.normal(size=(256, 80)), tf.float32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((200,)), Constant()])
        # The gradient is the pattern, whatever the weights and the rows are.
        model.compile(keras.optimizers.SGD(1.0), loss=lambda t, p: p)
    kernel = model.layers[0].kernel
    epochs = 4
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
    wanted = -epochs * STEPS * pattern.numpy()
    # What both workers still have is at most what a step rounds off.
    scale = np.abs(pattern.numpy()).max()
    limit = 2 * scale / 127 if compression else 1e-3
    error = np.abs(kernel.numpy() - wanted).max()
    assert error <= limit, (error, limit)


def an_error_does_not_hold_up_the_next_training(strategy, compression):
    """A step that fails while others wait for their turn gives it up."""

    class Failing(keras.layers.Layer):
        def call(self, inputs):
            check = tf.debugging.assert_less(tf.reduce_max(inputs), 100.0)
            with tf.control_dependencies([check]):
                return tf.identity(inputs)

    with strategy.scope():
        model = keras.Sequential([keras.Input((200,)), Failing(), keras.layers.Dense(300)])
        model.compile("sgd", "mse")
    bad = x.copy()
    bad[100, 3] = 1000.0
    for _ in range(2):
        try:
            model.fit(bad, np.zeros([len(x), 300], "float32"), batch_size=BATCH, verbose=0)
        except Exception as error:
            assert "less" in str(error), error
        else:
            raise AssertionError("a failing step passed")
        model.fit(x, np.zeros([len(x), 300], "float32"), batch_size=BATCH, verbose=0)
    assert threading.active_count() < 60


def main():
    compression = os.environ.get("OVERLAP_COMPRESSION") or None
    strategy = psp.ParameterServerStrategy(
        compression=compression, overlap_steps=True, max_staleness=BOUND
    )
    every_step_counts_once(strategy, compression)
    sums_of_gradients_are_not_shared(strategy, compression)
    residuals_are_kept(strategy, compression)
    an_error_does_not_hold_up_the_next_training(strategy, compression)
    print("all cases are as expected")


if __name__ == "__main__":
    main()
