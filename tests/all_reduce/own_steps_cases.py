"""Train steps of a user's own that compute with gradients."""

import os
import pathlib
from unittest import mock

import h5py
import keras
import numpy as np
import tensorflow as tf

from tests.support.parts import swapped

# Rows of batches of 8 on two replicas: the last batch has one row, and one replica has none.
ROWS, BATCH = 25, 8


class OwnStep(keras.Model):
    """A small model with an embedding; `change` is what its step does with gradients."""

    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Embedding(6, 3)
        self.hidden = keras.layers.Dense(4, "tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(keras.ops.reshape(self.embed(x), (-1, 6))))

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.trainable_variables)

    def change(self, gradients):
        return gradients

    def train_step(self, data):
        x, y = data
        loss, gradients = self.gradients(x, y)
        self.optimizer.apply(self.change(gradients), self.trainable_variables)
        return {"loss": loss}

    def make_variables(self):
        """Makes what the step keeps from batch to batch."""

    def make_callbacks(self):
        return []

    def results(self):
        return {}


class ClipByGlobalNorm(OwnStep):
    def change(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.1)[0]


class RowsClipped(OwnStep):
    """`tf.IndexedSlices` that stay so."""

    def change(self, gradients):
        first = gradients[0]
        values = tf.clip_by_value(first.values, -0.004, 0.004)
        return [tf.IndexedSlices(values, first.indices, first.dense_shape), *gradients[1:]]


class LoggedAfter(OwnStep):
    def train_step(self, data):
        x, y = data
        loss, gradients = self.gradients(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients[1:])}


class SavedWithinAccumulation(OwnStep):
    """A file, and what is in memory when `fit` ends: the sums of all workers."""

    def make_callbacks(self):
        strategy = tf.distribute.get_strategy()
        replicas = strategy.num_replicas_in_sync
        self.saved_file = pathlib.Path(self.folder, f"of-{replicas}.weights.h5")
        own = pathlib.Path(self.folder, f"own-{os.getpid()}.weights.h5")

        def save(batch, logs):
            if batch == 0:
                self.save_weights(own)

        return [
            keras.callbacks.ModelCheckpoint(self.saved_file, save_freq=5, save_weights_only=True),
            # A worker that asks nobody is told what its file lacks.
            keras.callbacks.LambdaCallback(on_train_batch_end=save),
        ]

    def results(self):
        found = {f"slot {i}": v.numpy() for i, v in enumerate(self.optimizer.variables)}
        with h5py.File(self.saved_file) as file:
            saved = file["optimizer/vars"]
            return found | {f"file {name}": saved[name][()] for name in saved}


class InFunction(OwnStep):
    @tf.function
    def train_step(self, data):
        x, y = data
        loss, gradients = self.gradients(x, y)
        gradients = tf.clip_by_global_norm(gradients, 0.1)[0]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class GradientsInFunction(OwnStep):
    @tf.function
    def gradients(self, x, y):
        return super().gradients(x, y)


class ChangedInFunction(OwnStep):
    @tf.function
    def gradients(self, x, y):
        loss, gradients = super().gradients(x, y)
        return loss, tf.clip_by_global_norm(gradients, 0.1)[0]


class ChangedAfterFunction(GradientsInFunction, ClipByGlobalNorm):
    """Returned by a function, and clipped outside of it."""


class KeptInVariables(OwnStep):
    """Accumulated and applied by hand, in every second step."""

    def make_variables(self):
        self.sums = [keras.Variable(tf.zeros(v.shape), trainable=False) for v in self.weights]
        self.batches = keras.Variable(0, dtype="int32", trainable=False)

    def train_step(self, data):
        x, y = data
        loss, gradients = self.gradients(x, y)
        for total, gradient in zip(self.sums, gradients):
            total.assign_add(tf.convert_to_tensor(gradient))
        self.batches.assign_add(1)

        def apply():
            self.optimizer.apply(self.sums, self.trainable_variables)
            for total in self.sums:
                total.assign(tf.zeros(total.shape))
            return 0

        tf.cond(self.batches.value % 2 == 0, apply, lambda: 0)
        return {"loss": loss}


class DerivedByHand(OwnStep):
    """Derivatives that no tape has returned, and rows of an embedding by the chain rule."""

    def train_step(self, data):
        x, y = data
        embedded = self.embed(x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(embedded)
            hidden = self.hidden(keras.ops.reshape(embedded, (-1, 6)))
            outputs = self.out(hidden)
            loss = tf.reduce_mean((outputs - y) ** 2)
        of_outputs = 2 * (outputs - y) / tf.cast(tf.shape(y)[0], tf.float32)
        kernel = tf.matmul(hidden, of_outputs, transpose_a=True)
        rows = tf.reshape(tape.gradient(loss, embedded), (-1, 3))
        table = tf.IndexedSlices(rows, tf.reshape(x, [-1]), tf.constant([6, 3], x.dtype))
        inner = self.hidden.trainable_variables
        of_hidden = tape.gradient(loss, hidden)
        of_inner = tape.gradient(hidden, inner, output_gradients=of_hidden)
        gradients = [table, *of_inner, kernel, tf.reduce_sum(of_outputs, 0)]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class WithInputs(OwnStep):
    """Of an input and of variables, by one call of a tape; a gradient is logged as it is."""

    def train_step(self, data):
        x, y = data
        embedded = tf.reshape(self.embed(x), (-1, 6))
        with tf.GradientTape() as tape:
            tape.watch(embedded)
            loss = self.compute_loss(x, y, self.out(self.hidden(embedded)))
        variables = self.trainable_variables[1:]
        of_input, *gradients = tape.gradient(loss, [embedded, *variables])
        self.optimizer.apply(gradients, variables)
        size = tf.reduce_mean(
            tf.reduce_sum(tf.abs(of_input * tf.cast(tf.shape(x)[0], "float32")), 1)
        )
        return {"loss": loss, "size": size, "bias": gradients[-1]}


class RowByRow(OwnStep):
    """Clips the gradient of each row, as Abadi et al. do for DP-SGD, CCS 2016."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables[1:]
        gradients = self.of_rows(x, y, variables)
        flat = tf.concat([tf.reshape(g, (tf.shape(x)[0], -1)) for g in gradients], 1)
        factors = tf.minimum(1.0, 0.3 / tf.norm(flat, axis=1))
        means = [
            tf.tensordot(factors, g, 1) / tf.cast(tf.shape(x)[0], "float32") for g in gradients
        ]
        self.optimizer.apply(means, variables)
        return {"loss": tf.reduce_mean(1 / factors)}

    def of_row(self, row):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(row[0][None]) - row[1]) ** 2)
        return tape.gradient(loss, [v.value for v in self.trainable_variables[1:]])


class RowsOfJacobian(RowByRow):
    def of_rows(self, x, y, variables):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum((self(x) - y) ** 2, 1)
        return tape.jacobian(losses, variables)


class RowsVectorized(RowByRow):
    def of_rows(self, x, y, variables):
        return tf.vectorized_map(self.of_row, (x, y))


class TakenInBranch(OwnStep):
    """Taken and clipped in a branch of the graph, and applied outside."""

    def train_step(self, data):
        x, y = data
        dense = lambda: [tf.convert_to_tensor(g) for g in self.gradients(x, y)[1]]  # noqa: E731
        clipped = lambda: tf.clip_by_global_norm(dense(), 0.1)[0]  # noqa: E731
        self.optimizer.build(self.trainable_variables)
        is_even = self.optimizer.iterations.value % 2 == 0
        gradients = tf.cond(is_even, clipped, dense)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": tf.norm(gradients[-1])}


class InLoop(OwnStep):
    """The mean of micro-batches that are taken one after the other."""

    def sums(self, x, y, turns=3):
        def turn(i, *sums):
            _, gradients = self.gradients(x, y)
            return i + 1, *[total + g for total, g in zip(sums, gradients)]

        zeros = [tf.zeros(v.shape) for v in self.trainable_variables]
        return tf.while_loop(lambda i, *_: i < turns, turn, (0, *zeros))[1:]

    def train_step(self, data):
        gradients = self.change([total / 3 for total in self.sums(*data)])
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": tf.constant(0.0)}


class AppliedInLoop(OwnStep):
    def train_step(self, data):
        x, y = data
        self.optimizer.build(self.trainable_variables)

        def turn(i):
            _, gradients = self.gradients(x, y)
            gradients = tf.clip_by_global_norm(gradients, 0.1)[0]
            self.optimizer.apply(gradients, self.trainable_variables)
            return i + 1

        tf.while_loop(lambda i: i < 2, turn, (0,))
        return {"loss": tf.constant(0.0)}


class NormAfterLoop(InLoop, ClipByGlobalNorm):
    """Refused: the norm is that of one replica's gradient."""


def trained(
    name, updates=None, momentum=0.5, accumulated=None, loss_scale=None, folder=None, **options
):
    """Trains a model, by the name of its class.

    Args:
        updates: As of the strategy.
        momentum: Of the optimizer.
        accumulated: The optimizer's `gradient_accumulation_steps`.
        loss_scale: Of the optimizer.
        folder: For files of all workers.
        **options: Of `compile`.
    """
    random = np.random.default_rng(0)
    x = random.integers(0, 6, (ROWS, 2))
    y = random.normal(size=(ROWS, 1)).astype("float32")
    with swapped(updates=updates):
        model = globals()[name]()
        model.folder = folder
        own = {"momentum": momentum, "gradient_accumulation_steps": accumulated}
        optimizer = keras.optimizers.SGD(0.5, **own)
        if loss_scale:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=loss_scale)
        model.compile(optimizer, "mse", **options)
        for layer, shape in zip(model.layers, ((None, 2), (None, 6), (None, 4))):
            layer.build(shape)
        model.optimizer.build(model.trainable_variables)
        model.make_variables()
        fit = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, callbacks=model.make_callbacks(), **fit).history
        return model, history | model.results()


def refused():
    try:
        trained("NormAfterLoop")
    except ValueError as error:
        return {"error": str(error)}
    return {}


class Clipped(keras.Model):
    """Without an embedding, whose rows are not compressed once the step has used them."""

    clips = True

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(64)

    def call(self, x):
        return self.hidden(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.clips:
            gradients = tf.clip_by_global_norm(gradients, 0.1)[0]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class AsItIs(Clipped):
    clips = False


def collectives_and_bytes():
    """Collectives that a step has, and bytes that it sends compressed."""
    from keras_psplus.all_reduce.step.replica_step import TapeGradients

    counts = {"as it is": collectives()}
    with mock.patch.object(TapeGradients, "note", lambda self, grads, variables: grads):
        counts["without stand-ins"] = collectives()
    for model in Clipped, AsItIs:
        with swapped(compression="int8") as strategy:
            fit_once(model)
            sent = [t for t in strategy.communication.traffic() if "kernel" in t.path]
            counts[f"bytes of {model.__name__}"] = sum(t.compressed_bytes for t in sent)
    return counts


def collectives():
    from keras_psplus.all_reduce.collectives.operations import Launcher

    original = Launcher.all_reduce
    with mock.patch.object(Launcher, "all_reduce", autospec=True, side_effect=original) as made:
        fit_once(AsItIs)
    return made.call_count


def fit_once(cls):
    model = cls()
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 64)), np.ones((4, 64)), batch_size=4, verbose=0)
