"""Steps of two workers in each mode: all count, late ones are dropped, errors are the script's."""

import contextlib
import functools
import re
import threading
import time
import traceback
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from keras_psplus.parameter_server import context
from keras_psplus.parameter_server.queue import Closure
from keras_psplus.parameter_server.scheduler import Scheduler
from tests.parameter_server.options import options
from tests.support.cluster import equals_one_process, run
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


class Counting(keras.Sequential):
    """Counts its steps on the servers."""

    def __init__(self, layers):
        super().__init__(layers, name="counting")
        counter = dict(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.counted = self.add_weight(name="steps", **counter)

    def train_step(self, data):
        self.counted.assign_add(1)
        return super().train_step(data)


def all_updates_count(strategy):
    with options(strategy):
        with strategy.scope():
            model = Counting([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.001), "mse")
        x = np.ones((200, 4), "float32")
        model.fit(x, x[:, :1], batch_size=2, verbose=0)
        model.evaluate(x, x[:, :1], batch_size=2, verbose=0)
        traffic = strategy.communication.traffic()
    sent = [one for one in traffic if one.direction == "gradient"]
    return {
        "steps": model.counted.numpy(),
        "iterations": model.optimizer.iterations.numpy(),
        "evaluated": model.metrics[0].count.numpy(),
        "bytes": sorted((one.logical_bytes, one.wire_bytes) for one in sent),
    }


@pytest.mark.extended
def test_no_update_of_two_workers_is_lost():
    found = run("async22", all_updates_count).first
    assert (found["steps"], found["iterations"], found["evaluated"]) == (100, 100, 200)
    # Nor is a byte that any of them has sent: of the bias and of the kernel.
    assert found["bytes"].tolist() == [[400, 400], [1600, 1600]]


class Lookup(keras.layers.Embedding):
    def call(self, inputs):
        return super().call(inputs)  # a line of the user's own


def a_row_that_does_not_exist(strategy):
    with options(strategy), strategy.scope():
        layers = [Lookup(10, 2, name="favourites"), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        model.compile("sgd", "mse")
        x = np.full((40, 1), 7)
        x[22] = 77
        try:
            model.fit(x, x, batch_size=4, verbose=0, shuffle=False)
        except tf.errors.InvalidArgumentError:
            return {"text": traceback.format_exc()}


def test_a_workers_error_is_the_users_own_and_told_once():
    results = run("async22", a_row_that_does_not_exist)
    text = str(results.first["text"]) + results.logs["chief-0"]
    assert text.count("77 is not in [0, 10)") == 1
    assert re.search(r"In \S*favourites\S*, run by worker-[01]", text), text
    assert "in call" in text
    assert "Received: batch 5 (counted from 0)" in text
    assert len(text.splitlines()) < 80


# Of two workers, one sleeps in every step so that it takes many times as long. In `async`, which
# does not wait for it, it sleeps longer still: where a machine is slow, both also have the same
# work to do.

STEPS = 16
PAUSES = {"sync": (0.04, 0.2), "async": (0.04, 0.6)}


@tf.function
def pid(x):
    """Id of the process that runs a step; the path depends on the batch, so nobody reads ahead."""
    path = tf.where(tf.size(x) >= 0, "/proc/self/stat", "")
    return tf.strings.to_number(tf.strings.split(tf.io.read_file(path))[0], tf.int64)


def pids_of_workers():
    found = []
    for worker in range(2):
        with tf.device(f"/job:worker/replica:0/task:{worker}"):
            found.append(int(pid(tf.ones([1]))))
    return found


class Slow(keras.Model):
    """Notes the steps that each worker has begun and done, and how far it was ahead."""

    def __init__(self, pauses):
        super().__init__()
        self.pids, self.pauses = pids_of_workers(), pauses
        self.dense = keras.layers.Dense(1)
        counts = dict(shape=(2,), initializer="zeros", trainable=False)
        self.begun = self.add_weight(name="begun", **counts)
        self.done = self.add_weight(name="done", **counts)
        self.ahead = self.add_weight(name="ahead", **counts)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        me = tf.cast(tf.equal(pid(x), self.pids), tf.float32)
        before = tf.reduce_sum(self.begun * me)
        ahead = before - tf.reduce_min(self.done)
        self.begun.assign_add(me)
        self.ahead.assign_add(me * tf.nn.relu(ahead - tf.reduce_sum(self.ahead * me)))
        # An element and the end of the data take as long each.
        microseconds = tf.cast(tf.reduce_sum(me * self.pauses) * 5e5, tf.int64)
        sleeping = tf.data.Dataset.range(1).apply(testing.sleep(microseconds))
        slept = sleeping.reduce(tf.constant(0, tf.int64), lambda total, i: total + i)
        logs = super().train_step((x + tf.cast(slept, x.dtype), y))
        with tf.control_dependencies([slept]):
            self.done.assign_add(me)
        return logs


def with_a_slow_worker(strategy, pauses, has_shares=False, **arguments):
    """What two workers have done, of which one is slow."""
    with options(strategy, **arguments):
        with strategy.scope():
            model = Slow(pauses)
            model.compile(keras.optimizers.SGD(0.01), "mse")
        x = np.ones((2 * STEPS, 4), "float32")
        model.fit(x[:2], x[:2, :1], batch_size=2, verbose=0)
        # Workers are level when an epoch begins, whoever took the step before.
        for counter in (model.begun, model.done, model.ahead):
            counter.assign(np.zeros(2))
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)
        policy = tf.data.Options()
        policies = tf.data.experimental.AutoShardPolicy
        policy.experimental_distribute.auto_shard_policy = (
            policies.DATA if has_shares else policies.OFF
        )
        model.fit(data.with_options(policy), verbose=0)
        return {
            "steps": int(model.optimizer.iterations.numpy()) - 1,
            "taken": model.begun.numpy().round(3),
            "ahead": model.ahead.numpy(),
            "counted": strategy.steps_by_worker,
            "dropped": strategy.dropped_gradients,
        }


def slow(pauses, **arguments):
    results = run("sync22", with_a_slow_worker, pauses=PAUSES[pauses], **arguments)
    assert results.first["steps"] == STEPS
    return results.first, results.logs["chief-0"]


@pytest.mark.extended
def test_synchronous_steps_wait_for_a_slow_worker():
    found, _ = slow("sync", mode="sync")
    # Half of each batch was each worker's.
    assert found["taken"].tolist() == [8, 8]
    assert found["dropped"] == 0


def test_backup_workers_do_not_wait_for_a_slow_worker():
    found, log = slow("sync", mode="sync", backup_workers=1)
    taken, fast, late = found["taken"], 0, 1
    # Every step counts one gradient, nearly always the fast worker's.
    assert sum(taken) == STEPS
    assert taken[fast] > 4 * taken[late]
    # That of the step before the measured ones as well.
    assert found["dropped"] == STEPS + 1
    assert re.search(r"17 gradients of 17 steps came late and were dropped \(.*worker-1: ", log)


def test_asynchronous_steps_do_not_wait_for_a_slow_worker():
    found, _ = slow("async", mode="async")
    taken = found["taken"].tolist()
    assert found["counted"].tolist() == taken and sum(taken) == STEPS
    assert taken[0] > 1.5 * taken[1]
    assert found["ahead"][0] > 2


@pytest.mark.parametrize("bound, has_shares", [(2, False), *extended((2, True))], ids=str)
def test_staleness_is_bounded(bound, has_shares):
    found, _ = slow("sync", mode="async", max_staleness=bound, has_shares=has_shares)
    assert sum(found["taken"]) == STEPS
    # Without the bound, the fast worker gets further ahead; with it, just as far.
    assert max(found["ahead"]) == bound


# Asynchronous steps that overlap.

BATCH, BATCHES, BOUND = 8, 12, 1
x = np.random.default_rng(0).normal(size=(BATCH * BATCHES, 200)).astype("float32")
y = (x[:, :1] > 0).astype("float32")


def made(strategy, **options_of_sgd):
    with strategy.scope():
        dense, dropout = keras.layers.Dense(300, "tanh"), keras.layers.Dropout(0.1, seed=5)
        model = keras.Sequential([keras.Input((200,)), dense, dropout, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, **options_of_sgd), "mse", metrics=["mae"])
    return model


class UnderWay(keras.callbacks.Callback):
    """Looks, after each batch, at how many closures each worker has begun with."""

    def __init__(self, strategy):
        super().__init__()
        self.queue, self.most, self.first_logs = strategy._context.scheduler.queue, 0, []

    def on_train_batch_end(self, batch, logs=None):
        begun = [c.tried_on for c in self.queue.closures if c.started is not None]
        self.most = max(self.most, *(begun.count(worker) for worker in range(2)))
        if batch == 0:
            self.first_logs.append(dict(logs))


def overlapping(strategy):
    return options(strategy, compression="int8", overlap=True, max_staleness=BOUND)


def every_overlapping_step_counts_once(strategy):
    with overlapping(strategy):
        model, under_way = made(strategy), UnderWay(strategy)
        fit = dict(batch_size=BATCH, epochs=8, verbose=0, callbacks=[under_way])
        history = model.fit(x, y, **fit).history
        assert int(model.optimizer.iterations.numpy()) == 8 * BATCHES
        # The limit of staleness counts steps that are under way.
        assert under_way.most == BOUND + 1, under_way.most
        # Also the first batch of an epoch has logs, which name the same metrics.
        assert all(set(logs) == {"loss", "mae"} for logs in under_way.first_logs)
        assert history["loss"][-1] < 0.8 * history["loss"][0], history
        # Metrics are those of all rows: evaluated alone, they are within what weights have moved.
        assert abs(model.evaluate(x, y, verbose=0)[0] - history["loss"][-1]) < 0.2


def sums_of_gradients_do_not_overlap(strategy):
    """A worker's sum goes on from step to step, so its steps come one after the other."""
    with overlapping(strategy):
        model = made(strategy, gradient_accumulation_steps=4)
        under_way = UnderWay(strategy)
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[under_way])
    assert under_way.most <= 1, under_way.most


def residuals_of_overlapping_steps_are_kept(strategy):
    """With error feedback all that is not sent is kept: what arrives is the sum of gradients."""
    pattern = np.random.default_rng(1).normal(size=(256, 80)).astype("float32")

    class Constant(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(256, 80), initializer="zeros", name="kernel")

        def call(self, inputs):
            nothing = tf.reduce_mean(inputs, 1, keepdims=True)[:, :1] * 0
            return nothing + tf.reduce_sum(self.kernel * pattern)

    with overlapping(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((200,)), Constant()])
            # The gradient is the pattern, whatever the weights and the rows are.
            model.compile(keras.optimizers.SGD(1.0), loss=lambda t, p: p)
        model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0)
    wanted = -4 * BATCHES * pattern
    # What both workers still have is at most what a step rounds off.
    error = np.abs(model.layers[0].kernel.numpy() - wanted).max()
    assert error <= 2 * np.abs(pattern).max() / 127, error


def an_error_does_not_hold_up_the_next_training(strategy):
    """A step that fails while others wait for their turn gives it up."""

    class Failing(keras.layers.Layer):
        def call(self, inputs):
            check = tf.debugging.assert_less(tf.reduce_max(inputs), 100.0)
            with tf.control_dependencies([check]):
                return tf.identity(inputs)

    before = threading.active_count()
    with overlapping(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((200,)), Failing(), keras.layers.Dense(300)])
            model.compile("sgd", "mse")
        bad = x.copy()
        bad[60, 3] = 1000.0
        zeros = np.zeros([len(x), 300], "float32")
        for _ in range(2):
            with pytest.raises(tf.errors.OpError, match="less"):
                model.fit(bad, zeros, batch_size=BATCH, verbose=0)
            model.fit(x, zeros, batch_size=BATCH, verbose=0)
    assert threading.active_count() < before + 10


def a_step_that_fails_does_not_hold_up_the_next(strategy):
    """It goes on, and the failed one is run anew, as often as a server does not answer."""
    queue, failed = strategy._context.scheduler.queue, []
    run_on = Closure.run_on

    def failing(closure, calls):
        running = queue._running[calls.worker.index]
        if closure.place == 2 and len(failed) < 2:
            failed.append(closure)
            with queue.changed:
                assert queue.changed.wait_for(lambda: len(running) > 1, 20)
            time.sleep(0.3)  # for the next one to wait on its worker; or else it goes on at once
            raise tf.errors.UnavailableError(
                None, None, "GRPC error information from remote target /job:ps/replica:0/task:0"
            )
        return run_on(closure, calls)

    with options(strategy, overlap=True), mock.patch.object(Closure, "run_on", failing):
        model = made(strategy)
        model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    assert failed and int(model.optimizer.iterations.numpy()) == 3 * BATCHES


class Counted(keras.Model):
    """Large weights whose values are how many updates were made, and by how many a step is late."""

    def __init__(self):
        super().__init__()
        make = functools.partial(self.add_weight, shape=(100, 100), initializer="zeros")
        self.kernels = [make(name=f"kernel_{i}") for i in range(4)]
        self.lacking = [keras.metrics.Mean(name=f"lacking_{i}") for i in range(4)]

    @property
    def metrics(self):
        return self.lacking

    def call(self, inputs):
        return inputs

    def train_step(self, data):
        # Of one element: an update may be half made when the whole is read.
        read = [kernel.value[0, 0] for kernel in self.kernels]
        one = 1 + 0 * tf.add_n(read)
        self.optimizer.apply([one * tf.ones((100, 100)) for _ in read], self.kernels)
        for metric, kernel, before in zip(self.lacking, self.kernels, read):
            metric.update_state(kernel.value[0, 0] - before - 1)
        return {metric.name: metric.result() for metric in self.lacking}


def gradients_lack_no_more_updates_than_without_overlap(strategy):
    """Between a worker's read and its update there is, on average, at most one of the other's.

    There is none while one worker waits for something else, as at the beginning. A step that did
    not wait for its own worker's step before could lack that one's update, too.
    """
    with options(strategy, overlap=True):
        with strategy.scope():
            model = Counted()
            model.compile(keras.optimizers.SGD(-1.0))
        history = model.fit(x, batch_size=2, epochs=2, verbose=0).history
    assert all(kernel.value.numpy().min() == 2 * len(x) / 2 for kernel in model.kernels)
    assert all(0 <= mean <= 1 for means in history.values() for mean in means), history


def whether_steps_overlap_is_measured(strategy):
    part, least = (mock.patch.object(context, name, 0) for name in ("_PART", "_BYTES"))
    begun = []

    class Looking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            begun.append(strategy.overlaps_steps)

    with options(strategy, overlap=None), part, least:
        model = made(strategy)
        model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[Looking()])
        assert int(model.optimizer.iterations.numpy()) == len(begun) == len(x)
    assert not begun[0] and any(begun)


@pytest.mark.parametrize(
    "case",
    [
        gradients_lack_no_more_updates_than_without_overlap,
        whether_steps_overlap_is_measured,
        a_step_that_fails_does_not_hold_up_the_next,
        sums_of_gradients_do_not_overlap,
        residuals_of_overlapping_steps_are_kept,
        an_error_does_not_hold_up_the_next_training,
        *extended(every_overlapping_step_counts_once),
    ],
    ids=lambda case: case.__name__,
)
def test_asynchronous_steps_that_overlap(case):
    run("async22", case)


def one_worker(strategy, optimizer):
    """Rows of a table, small and large variables, averages of batches, and a schedule."""
    ids = np.random.default_rng(1).integers(0, 500, (len(x), 3))
    with strategy.scope() if strategy else contextlib.nullcontext():
        rows, rest = keras.Input((3,), dtype="int64"), keras.Input((200,))
        found = keras.layers.Flatten()(keras.layers.Embedding(500, 20)(rows))
        hidden = keras.layers.Dense(60, "tanh", kernel_regularizer="l2")(rest)
        hidden = keras.layers.Dropout(0.1, seed=5)(keras.layers.BatchNormalization()(hidden))
        output = keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, found]))
        model = keras.Model([rows, rest], output)
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7)
        made = {
            "momentum": lambda: keras.optimizers.SGD(rate, momentum=0.9, clipnorm=1.0),
            "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5, use_ema=True),
        }
        model.compile(made[optimizer](), "mse", metrics=["mae"])
    fit = dict(batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    with options(strategy, overlap=True):
        history = model.fit([ids, x], y, **fit).history
    arrays = {f"weight {i}": weight for i, weight in enumerate(model.get_weights())}
    return arrays | {name: np.array(values) for name, values in history.items()}


@pytest.mark.parametrize(
    "layout, optimizer", [("async_threads", "momentum"), ("async_sharded", "adam")]
)
def test_overlapping_steps_of_one_worker_are_those_of_one_process(layout, optimizer):
    """Whatever a step reads, the one before has updated."""
    equals_one_process(layout, one_worker, optimizer=optimizer)


# The chief, beside workers that are threads of its process.

ROWS = 22


def epochs_after_the_first_step(strategy):
    """How often the chief has waited for one step alone."""
    waits, wait = [], Scheduler.wait_for

    def counted(self, condition):
        waits.append(condition)
        wait(self, condition)

    with options(strategy, mode="async"), mock.patch.object(Scheduler, "wait_for", counted):
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        ones = tf.ones([24, 1])
        model.fit(ones, ones, 4, epochs=3, verbose=0)
    return {"waits": len(waits)}


def test_the_chief_waits_for_the_first_step_alone():
    """It shows what logs are called; of later epochs that is known."""
    assert run("sync_threads", epochs_after_the_first_step).first["waits"] == 1


def synchronized_statistics(strategy):
    with options(strategy, mode="sync"), strategy.scope():
        norm = keras.layers.BatchNormalization(synchronized=True, name="norm")
        model = keras.Sequential([keras.Input((2,)), norm, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with options(strategy, mode="sync"), pytest.raises(ValueError, match="'norm' with synchron"):
        model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    return {}


def test_statistics_of_all_rows_are_refused():
    run("sync_threads", synchronized_statistics, may_show_errors=True)


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
        time.sleep(0.0 if number == ROWS - 1 else 0.3)
        return number


def steps_that_are_overtaken(strategy):
    with options(strategy, mode="async"):
        with strategy.scope():
            model = Overtaken([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        targets = tf.reshape(tf.range(ROWS, dtype=tf.float32), [-1, 1])
        for _ in range(2):
            found = model.evaluate(tf.ones_like(targets), targets, 4, verbose=0, return_dict=True)
            expected = {"number": 21.0, "seen": 3 + 7 + 11 + 15 + 19 + 21, "added": 21.0}
            assert found == expected, found


def test_logs_are_those_of_the_last_batch_whichever_comes_last():
    run("sync_threads", steps_that_are_overtaken)


def compiled(strategy, jit_compile):
    """Losses and weights of a model, of which all but the rows of a table can be compiled."""
    layers = keras.layers
    with options(strategy, mode="sync"):
        with strategy.scope():
            ids = keras.Input((3,), dtype="int32")
            h = layers.Flatten()(layers.Embedding(9, 4)(ids))
            h = layers.Dense(6, "tanh", kernel_regularizer="l2", activity_regularizer="l1")(h)
            # XLA draws other random numbers, in plain TensorFlow too.
            h = layers.BatchNormalization()(layers.Dropout(0.0)(h))
            model = keras.Model(ids, layers.Dense(1)(h))
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
        rows = tf.random.stateless_uniform([ROWS, 3], [1, 2], 0, 9, tf.int32)
        targets = tf.cast(tf.reduce_sum(rows, 1, keepdims=True), tf.float32) / 9
        # Of the few rows that a worker has of four, BatchNormalization magnifies the last bit.
        fit = model.fit(rows, targets, ROWS // 2, epochs=4, shuffle=False, verbose=0)
        evaluated = model.evaluate(rows, targets, 4, verbose=0)
        predicted = model.predict(rows, 4, verbose=0).sum()
    return model, {"losses": fit.history["loss"], "read": [evaluated, predicted]}


@pytest.mark.extended
def test_parts_of_steps_that_are_compiled_come_to_the_same():
    found, expected = (
        run("sync_threads", compiled, jit_compile=jit).first for jit in (True, False)
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-5, err_msg=name)
