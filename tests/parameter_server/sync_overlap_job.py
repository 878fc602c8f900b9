"""Synchronous steps that overlap, compared with one process, and what makes them not overlap.

sync_overlap_job.py FOLDER CASES

The chief of a cluster with two workers and two parameter servers. What the cases of `fit_cases.py`
come to is left in the folder.
"""

import contextlib
import functools
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.parameter_server.sync import automatic
from tests.multi_process import fit_cases

BATCH, STEPS = 8, 12
rng = np.random.default_rng(0)
x = rng.normal(size=(BATCH * STEPS, 20)).astype("float32")
y = (x[:, :1] * x[:, 1:2] > 0).astype("float32")


def trained(strategy, make=keras.Sequential, callbacks=(), data=x, labels=y, layers=None, **kwargs):
    """A model, and the number of its steps that have begun from copies."""
    keras.utils.set_random_seed(3)
    before = 0 if strategy is None else strategy._context.attempts.overlapped
    with strategy.scope() if strategy else psp.single_process():
        model = make((layers or dense)())
        model.compile(keras.optimizers.Adam(0.01), "mse")
    fit = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False}
    if isinstance(data, tf.data.Dataset):
        labels, fit = None, {"verbose": 0}
    with contextlib.nullcontext() if strategy else psp.single_process():
        model.fit(data, labels, **{**fit, **kwargs}, callbacks=list(callbacks))
    after = 0 if strategy is None else strategy._context.attempts.overlapped
    return model, after - before


def dense():
    # One kernel that is cut over both servers, and small variables that come together.
    return [
        keras.Input((20,)),
        keras.layers.Dense(1000, activation="tanh"),
        keras.layers.Dense(30, activation="tanh"),
        keras.layers.Dense(1),
    ]


def compare(model, expected):
    for found, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@functools.cache
def plain():
    """The model that one process has trained."""
    return trained(None)[0]


def pulled(communication):
    traffic = communication.traffic()
    return sum(one.wire_bytes for one in traffic if one.direction == "pull")


def first_steps_are_measured_with_and_without(strategy):
    """As with `overlap_steps="auto"`, on links of which any may be worth it."""
    context, expected = strategy._context, trained(None, epochs=3)[0]
    before, automatic._PART, automatic._BYTES = context.overlap, 0.0, 0
    context.overlap = automatic.OverlapChoice(None, 2, context.totals)
    try:
        model, overlapped = trained(strategy, epochs=3)
    finally:
        context.overlap = before
    # Eight steps come before those that overlap, of which an epoch's first does not.
    assert 4 <= overlapped <= 28, overlapped
    compare(model, expected)


def almost_all_steps_overlap_and_bytes_are_those_of_one_read_a_step(strategy):
    before = pulled(strategy.communication)
    model, overlapped = trained(strategy)
    sent = pulled(strategy.communication) - before
    compare(model, plain())
    # The first step reads the servers: there are no copies yet.
    assert overlapped == 2 * STEPS - 1, overlapped
    weights = sum(4 * w.size for w in model.get_weights())
    # By both workers; once more at the beginning.
    np.testing.assert_allclose(sent, 2 * weights * (2 * STEPS + 1), rtol=0.01)


def callbacks_may_write(strategy):
    """What is set between two steps, no copy knows of: the next step reads the servers."""

    class Setting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)
            if batch == 7:
                weights = self.model.get_weights()
                self.model.set_weights([weight + 0.01 for weight in weights])
            if batch == 9:
                self.model.optimizer.learning_rate = 0.002

    model, overlapped = trained(strategy, callbacks=[Setting()])
    compare(model, trained(None, callbacks=[Setting()])[0])
    assert overlapped == 2 * STEPS - 7, overlapped


class ReadsLater(keras.Sequential):
    """Looks at a weight and at the number of steps after the optimizer's turn."""

    def train_step(self, data):
        logs = super().train_step(data)
        kernel = tf.reduce_sum(tf.abs(tf.convert_to_tensor(self.layers[0].kernel)))
        return logs | {"kernel": kernel, "steps": tf.cast(self.optimizer.iterations, tf.float32)}


class Logs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen, self.kernels = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.kernels.append(np.abs(self.model.layers[0].kernel.numpy()).sum())

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((logs["kernel"], logs["steps"]))


def what_is_read_later_is_from_before_the_step(strategy):
    logs = Logs()
    model, overlapped = trained(strategy, ReadsLater, [logs])
    compare(model, plain())
    assert overlapped == 2 * STEPS - 1, overlapped
    assert [steps for _, steps in logs.seen] == list(range(2 * STEPS)), logs.seen
    np.testing.assert_allclose([kernel for kernel, _ in logs.seen], logs.kernels, rtol=1e-5)


class ReadsInside(keras.Sequential):
    """Reads a weight in a function of its own."""

    def train_step(self, data):
        logs = super().train_step(data)

        @tf.function
        def size():
            return tf.reduce_sum(tf.abs(tf.convert_to_tensor(self.layers[-1].bias)))

        return logs | {"size": size()}


def what_cannot_read_copies_does_not_overlap(strategy):
    model, overlapped = trained(strategy, ReadsInside)
    compare(model, plain())
    assert overlapped == 0, overlapped


class ReadsInsideOfShort(ReadsInside):
    """... for batches of short sequences only."""

    def train_step(self, data):
        if data[0].shape[1] < 4:
            return super().train_step(data)
        return keras.Sequential.train_step(self, data)


def steps_that_overlap_and_others_take_turns(strategy):
    lengths = [5, 5, 3, 5, 3, 3, 5, 5]
    batches = [rng.normal(size=(BATCH, length, 4)).astype("float32") for length in lengths]

    def data():
        spec = tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, 1])
        rows = ((batch, y[:BATCH]) for batch in batches)
        dataset = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return dataset.with_options(options)

    def layers():
        return [
            keras.Input((None, 4)),
            keras.layers.Dense(6),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]

    model, overlapped = trained(strategy, ReadsInsideOfShort, data=data(), layers=layers, epochs=1)
    compare(model, trained(None, data=data(), layers=layers, epochs=1)[0])
    # Those whose step before has brought copies.
    assert overlapped == 2, overlapped


def rows_of_embeddings(strategy):
    ids = rng.integers(0, 50, size=(BATCH * STEPS, 3))

    def layers():
        return [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(50, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]

    model, overlapped = trained(strategy, data=ids, layers=layers)
    compare(model, trained(None, data=ids, layers=layers)[0])
    assert overlapped == 2 * STEPS - 1, overlapped


class Checked(keras.Sequential):
    def call(self, inputs, training=None, mask=None):
        with tf.control_dependencies([tf.debugging.assert_less(inputs, 1e6)]):
            return super().call(tf.identity(inputs), training=training, mask=mask)


def an_error_changes_no_weight(strategy):
    """What one worker has sent before the other met an error is undone."""
    bad = x.copy()
    # A row of the second worker's, in the fourth batch.
    bad[4 * BATCH - 1] = 1e9

    class Weights(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.weights = self.model.get_weights()

    weights = Weights()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Checked(dense())
        model.compile(keras.optimizers.Adam(0.01), "mse")
    fit = {"batch_size": BATCH, "verbose": 0, "shuffle": False}
    try:
        model.fit(bad, y, callbacks=[weights], **fit)
    except tf.errors.InvalidArgumentError:
        pass
    else:
        raise AssertionError("no error")
    assert int(model.optimizer.iterations.numpy()) == 3
    for found, wanted in zip(model.get_weights(), weights.weights, strict=True):
        np.testing.assert_array_equal(found, wanted)
    model.fit(x[3 * BATCH :], y[3 * BATCH :], **fit)
    compare(model, trained(None, epochs=1)[0])


def models_of_the_same_weights(strategy):
    """Each has copies of its own, which the other's steps make old."""

    def train(scope):
        keras.utils.set_random_seed(3)
        with scope:
            first = keras.Sequential(dense())
            first.compile(keras.optimizers.SGD(0.05), "mse")
            second = keras.Sequential(first.layers)
            second.compile(keras.optimizers.SGD(0.02), "mae")
        with contextlib.nullcontext() if scope is not alone else psp.single_process():
            for model in (first, first, second, first, second, second):
                model.train_on_batch(x[:BATCH], y[:BATCH])
        return first

    alone = psp.single_process()
    before = strategy._context.attempts.overlapped
    model = train(strategy.scope())
    assert strategy._context.attempts.overlapped == before + 2
    compare(model, train(alone))


def a_function_that_writes_ends_it(strategy):
    """The last case: from here on, no step of this process overlaps."""

    class Halving(keras.callbacks.Callback):
        @tf.function
        def halve(self):
            bias = self.model.layers[-1].bias.value
            bias.assign(bias * 0.5)

        def on_train_batch_end(self, batch, logs=None):
            self.halve()

    model, overlapped = trained(strategy, callbacks=[Halving()])
    compare(model, trained(None, callbacks=[Halving()])[0])
    assert overlapped <= 1, overlapped


CASES = [
    first_steps_are_measured_with_and_without,
    almost_all_steps_overlap_and_bytes_are_those_of_one_read_a_step,
    callbacks_may_write,
    what_is_read_later_is_from_before_the_step,
    what_cannot_read_copies_does_not_overlap,
    steps_that_overlap_and_others_take_turns,
    rows_of_embeddings,
    an_error_changes_no_weight,
    models_of_the_same_weights,
    a_function_that_writes_ends_it,
]

if __name__ == "__main__":
    strategy = psp.ParameterServerStrategy(
        startup_timeout=60, heartbeat_timeout=30, mode="sync", overlap_steps=True
    )
    fit_cases.run(
        [name for name in sys.argv[2].split(",") if name], strategy, "cluster", sys.argv[1]
    )
    for case in CASES:
        case(strategy)
        print(f"done {case.__name__}", flush=True)
