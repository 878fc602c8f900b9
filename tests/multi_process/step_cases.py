"""Cases of steps: options of optimizers, and `train_step`s of a script's own."""

import keras
import numpy as np
import tensorflow as tf

from tests.multi_process.case_models import blobs, case, compiled, mlp, numpy_defaults, trained


@case
def global_clipnorm():
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
    return trained(mlp(optimizer), *blobs(), **numpy_defaults())


@case
def adamw_with_schedule_and_average():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8)
    optimizer = keras.optimizers.AdamW(
        schedule,
        weight_decay=0.01,
        clipvalue=0.01,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=4,
    )
    return trained(mlp(optimizer), *blobs(), **numpy_defaults())


@case
def gradient_accumulation_in_loop():
    optimizer = keras.optimizers.Adam(0.02, gradient_accumulation_steps=2, clipnorm=0.1)
    return trained(mlp(optimizer, steps_per_execution=3), *blobs(), **numpy_defaults())


class Contrastive(keras.Model):
    """Has no `call`, nothing that is built, and a second optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(6, "tanh"), keras.layers.Dense(4)])
        self.head = keras.layers.Dense(2)
        self.of_head = keras.optimizers.SGD(0.2, momentum=0.5)

    def views(self, data):
        x = data[0]
        return [self.head(self.encoder(part)) for part in (x[:, :6], x[:, 6:])]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            a, b = self.views(data)
            loss = self.compute_loss(y=tf.tanh(a), y_pred=b)
        first, last = self.encoder.trainable_variables, self.head.trainable_variables
        of_first, of_last = tape.gradient(loss, [first, last])
        self.optimizer.apply(of_first, first)
        self.of_head.apply(of_last, last)
        return self.compute_metrics(data[0], a, b)

    def test_step(self, data):
        a, b = self.views(data)
        self.compute_loss(y=a, y_pred=b)
        return self.compute_metrics(data[0], a, b)


@case
def step_of_its_own_without_call():
    model = Contrastive()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return trained(model, *blobs(), **numpy_defaults(validation_split=0.3))


class OwnModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.out = keras.layers.Dense(4)

    def call(self, x):
        return self.out(self.hidden(x))


class OwnLoss(OwnModel):
    """As in Keras's guide "Customizing what happens in fit()", with and without a mean."""

    def __init__(self, mean):
        super().__init__()
        self.mean = mean
        self.tracker = keras.metrics.Mean(name="own_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = keras.ops.mean(loss) if self.mean else loss
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"own_loss": self.tracker.result(), "last": keras.ops.mean(loss)}


@case
def own_loss_as_vector():
    model = OwnLoss(mean=False)
    model.compile(keras.optimizers.SGD(0.001))
    return trained(model, *blobs(), **numpy_defaults())


@case
def own_loss_with_an_empty_replica():
    model = OwnLoss(mean=True)
    model.compile("sgd")
    return trained(model, *blobs(101), **numpy_defaults())


class GradientPenalty(OwnModel):
    """Takes a gradient by its inputs inside, and logs a variable."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                energy = tf.reduce_sum(self(x))
            slopes = inner.gradient(energy, x)
            loss = tf.reduce_mean(tf.square(tf.norm(slopes, axis=1) - 1.0))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = [(g, v) for g, v in zip(gradients, self.trainable_variables) if g is not None]
        self.optimizer.apply_gradients(pairs)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result(), "rate": self.optimizer.learning_rate}


@case
def gradient_penalty():
    model = GradientPenalty()
    model.compile(keras.optimizers.SGD(0.1))
    rates = []
    read = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    model, results = trained(model, *blobs(101), **numpy_defaults(callbacks=[read]))
    return model, results | {"rates": np.asarray(rates)}


class InBatchNegatives(keras.Model):
    """Pairs, told from those of all other rows of the global batch, as differences.md has it."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(6), keras.layers.Dense(6)

    def call(self, x):
        return self.left(x), self.right(x[:, ::-1])

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            anchors, positives = self(x, training=True)
            context = tf.distribute.get_replica_context()
            rank, rows = context.replica_id_in_sync_group, tf.shape(anchors)[0]
            candidates = context.all_gather(positives, axis=0)
            owners = context.all_gather(tf.fill([rows], rank), axis=0)
            places = tf.where(owners == rank)[:, 0]
            labels = tf.pad(places, [[0, rows - tf.shape(places)[0]]])
            logits = tf.matmul(anchors, candidates, transpose_b=True)
            loss = self.compute_loss(y=labels, y_pred=logits)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(x, labels, logits)


@case
def in_batch_negatives():
    """The last batch has one row, so that a worker has none."""
    model = InBatchNegatives()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    x, _ = blobs(17)
    return trained(model, x, None, **numpy_defaults(batch_size=8))


class ThreeSteps(keras.Sequential):
    """Takes three gradient steps on each batch, in a loop of the graph."""

    def train_step(self, data):
        x, y = data

        def step(i, _):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return i + 1, loss

        before = tf.reduce_sum(self.layers[0].kernel)
        _, loss = tf.while_loop(lambda i, _: i < 3, step, (0, 0.0))
        return {"loss": loss, "change": tf.reduce_sum(self.layers[0].kernel) - before}


@case
def several_steps_in_a_loop():
    hidden = keras.layers.Dense(16, kernel_regularizer="l2")
    model = ThreeSteps([keras.Input((12,)), hidden, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), loss)
    return trained(model, *blobs(rows=200), **numpy_defaults())


@case
def moving_average_after_skipped_steps():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3), initial_scale=2.0**8
    )
    layers = [
        keras.layers.Dense(16, activation="relu", kernel_constraint="non_neg"),
        keras.layers.Dense(4),
    ]
    return trained(compiled(layers, optimizer), *blobs(), **numpy_defaults())
