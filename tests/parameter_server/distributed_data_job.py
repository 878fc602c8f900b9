"""Data that the script has distributed, in the modes in which the chief reads; in one process."""

import os
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cluster.in_process import InProcessCluster
from keras_psplus.parameter_server.scheduling.scheduler import Scheduler

ROWS, BATCH = 22, 4
BATCHES = 7  # of two workers: 3 batches of the even rows and 4 of the odd ones


def of_worker(context):
    """The even rows for one worker; the odd ones, twice the first, for the other."""
    odd = context.input_pipeline_id
    rows = tf.data.Dataset.range(odd, ROWS, 2)
    rows = rows.concatenate(tf.data.Dataset.range(1, 3, 2)) if odd else rows
    rows = rows.concatenate(rows.take(2)) if odd else rows
    return rows.batch(BATCH).map(lambda n: (tf.ones([tf.size(n), 1]), tf.cast(n, tf.float32)))


def waits_in_epochs(cluster, epochs):
    """How often the chief has waited for one step alone."""
    waits, original = [], Scheduler.wait_for

    def counted(self, condition):
        waits.append(condition)
        original(self, condition)

    Scheduler.wait_for = counted
    try:
        strategy = psp.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = tf.ones([24, 1])
        model.fit(x, x, BATCH, epochs=epochs, verbose=0)
    finally:
        Scheduler.wait_for = original
    return len(waits)


class Overtaken(keras.Sequential):
    """Whose test steps take long, but for that of the last batch."""

    def __init__(self, layers):
        super().__init__(layers)
        self.seen = keras.metrics.Sum(name="seen")

    @property
    def metrics(self):
        return [*super().metrics, self.seen]

    def test_step(self, data):
        number = tf.reduce_max(data[1])
        number = tf.numpy_function(self._slowly, [number], tf.float32)
        number.set_shape([])
        before = self.seen.result()
        self.seen.update_state(number)
        return {"number": number, "seen": self.seen.result(), "added": self.seen.result() - before}

    @staticmethod
    def _slowly(number):
        time.sleep(0.0 if number == ROWS - 1 else 0.5)
        return number


def check_logs_of_the_last_batch(cluster):
    """Whichever step comes back last, the logs are the last batch's."""
    for mode in ("sync", "async"):
        strategy = psp.ParameterServerStrategy(cluster.cluster_resolver, mode=mode)
        with strategy.scope():
            model = Overtaken([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        y = tf.reshape(tf.range(ROWS, dtype=tf.float32), [-1, 1])
        for _ in range(2):
            found = model.evaluate(tf.ones_like(y), y, BATCH, verbose=0, return_dict=True)
            expected = {"number": 21.0, "seen": 3 + 7 + 11 + 15 + 19 + 21, "added": 21.0}
            assert found == expected, (mode, found)


def trained(cluster, mode, rate, jit_compile):
    """Losses and weights of a model, of which all but the rows of a table can be compiled."""
    strategy = psp.ParameterServerStrategy(cluster.cluster_resolver, mode=mode)
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        ids = keras.Input((3,), dtype="int32")
        h = layers.Flatten()(layers.Embedding(9, 4)(ids))
        h = layers.Dense(6, "tanh", kernel_regularizer="l2", activity_regularizer="l1")(h)
        # XLA draws other random numbers, in plain TensorFlow too.
        h = layers.BatchNormalization()(layers.Dropout(0.0)(h))
        model = keras.Model(ids, layers.Dense(1)(h))
        model.compile(keras.optimizers.SGD(rate), "mse", jit_compile=jit_compile)
    x = tf.random.stateless_uniform([ROWS, 3], [1, 2], 0, 9, tf.int32)
    y = tf.cast(tf.reduce_sum(x, 1, keepdims=True), tf.float32) / 9
    # Of the few rows that a worker has of four, BatchNormalization magnifies the last bit.
    losses = model.fit(x, y, ROWS // 2, epochs=4, shuffle=False, verbose=0).history["loss"]
    losses += [model.evaluate(x, y, BATCH, verbose=0), model.predict(x, BATCH, verbose=0).sum()]
    return [np.array(losses), *model.get_weights()]


def check_compiled(cluster):
    """Parts of steps that XLA compiles come to the same as without."""
    # Of asynchronous steps, a rate of 0 leaves what does not depend on their order.
    for mode, rate in (("sync", 0.1), ("async", 0.0)):
        found, expected = (trained(cluster, mode, rate, jit) for jit in (True, False))
        if mode == "async":
            # BatchNormalization's averages, which are read in evaluation, depend on it.
            found, expected = [found[0][:4]], [expected[0][:4]]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=mode)


def main():
    expected = sum(range(ROWS)) + 1 + 1 + 3
    rows = ROWS + 3
    with InProcessCluster(workers=2, ps=1) as cluster:
        for options in ({"mode": "sync"}, {"max_staleness": 1}):
            strategy = psp.ParameterServerStrategy(cluster.cluster_resolver, **options)
            with strategy.scope():
                zeros = keras.layers.Dense(1, kernel_initializer="zeros")
                model = keras.Sequential([keras.Input((1,)), zeros])
                # Of zeros, the mean absolute error is the mean of the targets.
                model.compile(keras.optimizers.SGD(0.0), "mae")
            data = strategy.distribute_datasets_from_function(of_worker)
            found = model.fit(data, epochs=2, verbose=0).history["loss"]
            found += [model.evaluate(data, verbose=0)]
            assert all(abs(loss - expected / rows) < 1e-4 for loss in found), (options, found)
            assert int(model.optimizer.iterations) == 2 * BATCHES, model.optimizer.iterations
            assert model.predict(data, verbose=0).shape == (rows, 1)
            whole = tf.data.Dataset.range(ROWS).batch(BATCH)
            whole = whole.map(lambda n: (tf.ones([tf.size(n), 1]), tf.cast(n, tf.float32)))
            data = strategy.experimental_distribute_dataset(whole)
            found = model.fit(data, epochs=2, validation_data=data, verbose=0).history
            for loss in found["loss"] + found["val_loss"]:
                assert abs(loss - (ROWS - 1) / 2) < 1e-4, (options, found)
            print(f"done {options}", flush=True)
        # The first step shows what logs are called; of later epochs that is known.
        assert waits_in_epochs(cluster, 3) == 1
        check_logs_of_the_last_batch(cluster)
        check_compiled(cluster)
    sys.stdout.flush()
    # The servers cannot be stopped in any other way.
    os._exit(0)


if __name__ == "__main__":
    main()
