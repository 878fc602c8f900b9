"""Synchronous steps that overlap in real processes: equal to one process, whatever happens."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.parameter_server import context
from tests.parameter_server.options import options
from tests.parameter_server.test_late_reads import masked
from tests.support.cluster import equals_one_process
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

BATCH, STEPS = 8, 8
x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 20)).astype("float32")
y = (x[:, :1] * x[:, 1:2] > 0).astype("float32")


def overlap(case):
    """A case whose steps overlap."""

    @functools.wraps(case)
    def overlapping(strategy, **args):
        with options(strategy, overlap=True):
            return case(strategy, **args)

    return overlapping


def dense():
    # One kernel that is cut over both servers, and small variables that come together.
    return [
        keras.Input((20,)),
        keras.layers.Dense(1000, activation="tanh"),
        keras.layers.Dense(30, activation="tanh"),
        keras.layers.Dense(1),
    ]


def scope(strategy):
    return strategy.scope() if strategy else tf.distribute.get_strategy().scope()


def built(strategy, make=keras.Sequential, layers=dense):
    with scope(strategy):
        model = make(layers())
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def trained(strategy, make=keras.Sequential, data=x, layers=dense, overlapped=None, **kwargs):
    """A model that is trained, of which some number of steps have begun from copies."""
    before = overlapped_steps(strategy)
    model = built(strategy, make, layers)
    fit = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False}
    if isinstance(data, tf.data.Dataset):
        model.fit(data, verbose=0)
    else:
        model.fit(data, y, **fit | kwargs)
    if strategy and overlapped is not None:
        found = overlapped_steps(strategy) - before
        assert found in overlapped if isinstance(overlapped, range) else found == overlapped, found
    return model


def overlapped_steps(strategy):
    return strategy._context.attempts.overlapped if strategy else 0


def first_steps_are_measured_with_and_without(strategy):
    """As with `overlap_steps="auto"`, on links of which any may be worth it."""
    part, least = (mock.patch.object(context, name, 0) for name in ("_PART", "_BYTES"))
    with options(strategy, overlap=None), part, least:
        # Eight steps come before those that overlap, of which an epoch's first does not.
        return trained(strategy, epochs=3, overlapped=range(4, 3 * STEPS - 7)), {}


@overlap
def almost_all_steps_overlap_and_bytes_are_those_of_one_read_a_step(strategy):
    def pulled():
        traffic = strategy.communication.traffic() if strategy else []
        return sum(one.wire_bytes for one in traffic if one.direction == "pull")

    before = pulled()
    # The first step reads the servers: there are no copies yet.
    model = trained(strategy, overlapped=2 * STEPS - 1)
    if strategy:
        weights = sum(4 * w.size for w in model.get_weights())
        # By both workers; once more at the beginning.
        wanted = 2 * weights * (2 * STEPS + 1)
        np.testing.assert_allclose(pulled() - before, wanted, rtol=0.01)
    return model, {}


@overlap
def callbacks_may_write(strategy):
    """What is set between two steps, no copy knows of: the next step reads the servers."""

    class Setting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)
            if batch == 5:
                weights = self.model.get_weights()
                self.model.set_weights([weight + 0.01 for weight in weights])
            if batch == 6:
                self.model.optimizer.learning_rate = 0.002

    return trained(strategy, callbacks=[Setting()], overlapped=2 * STEPS - 7), {}


class ReadsLater(keras.Sequential):
    """Looks at the number of steps after the optimizer's turn."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"steps": tf.cast(self.optimizer.iterations, tf.float32)}


class Logs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs["steps"])


@overlap
def steps_are_counted_with_the_present_one(strategy):
    logs = Logs()
    model = trained(strategy, ReadsLater, callbacks=[logs], overlapped=2 * STEPS - 1)
    return model, {"steps": logs.seen}


class ReadsInside(keras.Sequential):
    """Reads a weight in a function of its own."""

    def train_step(self, data):
        @tf.function
        def size():
            return tf.reduce_sum(tf.abs(tf.convert_to_tensor(self.layers[-1].bias)))

        return {"size": size()} | super().train_step(data)


@overlap
def what_cannot_read_copies_does_not_overlap(strategy):
    return trained(strategy, ReadsInside, epochs=1, overlapped=0), {}


class ReadsInsideOfShort(ReadsInside):
    """... for batches of short sequences only."""

    def train_step(self, data):
        if data[0].shape[1] < 4:
            return super().train_step(data)
        return keras.Sequential.train_step(self, data)


@overlap
def steps_that_overlap_and_others_take_turns(strategy):
    lengths, random = [5, 5, 3, 5, 3, 3, 5, 5], np.random.default_rng(1)
    batches = [random.normal(size=(BATCH, length, 4)).astype("float32") for length in lengths]
    spec = tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, 1])
    rows = [(batch, y[:BATCH]) for batch in batches]
    data = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

    def layers():
        return [
            keras.Input((None, 4)),
            keras.layers.Dense(6),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]

    data = data.with_options(options)
    make = ReadsInsideOfShort if strategy else keras.Sequential
    # Those overlap whose step before has brought copies.
    return trained(strategy, make, data, layers, overlapped=2), {}


class Checked(keras.Sequential):
    def call(self, inputs, training=None, mask=None):
        with tf.control_dependencies([tf.debugging.assert_less(inputs, 1e6)]):
            return super().call(tf.identity(inputs), training=training, mask=mask)


@overlap
def an_error_changes_no_weight(strategy):
    """What one worker has sent before the other met an error is undone."""
    if strategy is None:
        return trained(strategy, epochs=1), {}
    bad = x.copy()
    # A row of the second worker's, in the fourth batch.
    bad[4 * BATCH - 1] = 1e9

    class Weights(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.weights = self.model.get_weights()

    weights = Weights()
    model = built(strategy, Checked)
    fit = {"batch_size": BATCH, "verbose": 0, "shuffle": False}
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(bad, y, callbacks=[weights], **fit)
    assert int(model.optimizer.iterations.numpy()) == 3
    for found, wanted in zip(model.get_weights(), weights.weights, strict=True):
        np.testing.assert_array_equal(found, wanted)
    model.fit(x[3 * BATCH :], y[3 * BATCH :], **fit)
    return model, {}


@overlap
def models_of_the_same_weights(strategy):
    """Each has copies of its own, which the other's steps make old."""
    before = overlapped_steps(strategy)
    with scope(strategy):
        first = keras.Sequential(dense())
        first.compile(keras.optimizers.SGD(0.05), "mse")
        second = keras.Sequential(first.layers)
        second.compile(keras.optimizers.SGD(0.02), "mae")
    for model in (first, first, second, first, second, second):
        model.train_on_batch(x[:BATCH], y[:BATCH])
    assert strategy is None or overlapped_steps(strategy) == before + 2
    return first, {}


@overlap
def a_function_that_writes_ends_it(strategy):
    class Halving(keras.callbacks.Callback):
        @tf.function
        def halve(self):
            bias = self.model.layers[-1].bias.value
            bias.assign(bias * 0.5)

        def on_train_batch_end(self, batch, logs=None):
            self.halve()

    return trained(strategy, callbacks=[Halving()], epochs=1, overlapped=range(2)), {}


@overlap
def masks_are_counted_in_the_whole_batch(strategy):
    before = overlapped_steps(strategy)
    with scope(strategy):
        model, logs = masked(by_weights=False)
    assert strategy is None or overlapped_steps(strategy) > before
    return model, logs


@pytest.mark.parametrize(
    "case",
    [
        first_steps_are_measured_with_and_without,
        almost_all_steps_overlap_and_bytes_are_those_of_one_read_a_step,
        *extended(
            masks_are_counted_in_the_whole_batch,
            callbacks_may_write,
            steps_are_counted_with_the_present_one,
            an_error_changes_no_weight,
            steps_that_overlap_and_others_take_turns,
            models_of_the_same_weights,
        ),
    ],
    ids=lambda case: case.__name__,
)
def test_overlapping_steps_equal_one_process(case):
    equals_one_process("sync22", case)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (what_cannot_read_copies_does_not_overlap, "steps do not overlap, as it reads a variable"),
        (a_function_that_writes_ends_it, "a function of the script assigns to variables on param"),
    ],
    ids=["reads", "writes"],
)
def test_it_is_said_why_steps_do_not_overlap(case, reason):
    assert reason in equals_one_process("sync22", case).logs["chief-0"]
