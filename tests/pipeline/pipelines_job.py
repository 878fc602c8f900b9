"""Trains models in two pipelines of two stages each, on four devices or workers, and alone.

pipelines_job.py SCHEDULE CASE... [writes]
"""

import os
import sys

from tests import quick_start, references  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cluster.in_process import logical_devices
from keras_psplus.pipeline import startup
from tests.pipeline import slow_writes

layers = keras.layers
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(50, 12).astype("float32"), RANDOM.randint(0, 3, 50)
TOKENS = RANDOM.randint(0, 40, (50, 9))
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense():
    inputs = keras.Input((12,))
    first = layers.Dense(16, activation="tanh", kernel_regularizer="l2")(inputs)
    second = layers.Dense(16, kernel_constraint="unit_norm")(layers.LayerNormalization()(first))
    return keras.Model(inputs, layers.Dense(3)(layers.Add()([first, second]))), X


def recurrent():
    """A loop whose steps the mask of another layer leaves out."""
    stack = [layers.Embedding(40, 8, mask_zero=True), layers.SimpleRNN(8), layers.Dense(3)]
    return keras.Sequential(stack), TOKENS


class Tied(keras.Model):
    """Uses a table again, in another layer's place."""

    def __init__(self):
        super().__init__()
        self.table, self.out = layers.Embedding(40, 8), layers.Dense(3)

    def call(self, x):
        scores = keras.ops.matmul(self.table(x), keras.ops.transpose(self.table.embeddings))
        return self.out(keras.ops.mean(scores, 1))


def tied():
    return Tied(), TOKENS


def stateful():
    """What depends on the order of micro-batches, and on nothing else."""
    stack = [layers.Dense(16, use_bias=False), layers.BatchNormalization(), layers.Dropout(0.3)]
    stack += [layers.SpectralNormalization(layers.Dense(8)), layers.Dense(3)]
    return keras.Sequential(stack), X


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


def own_step():
    return OwnStep([layers.Dense(8, activation="tanh"), layers.Dense(3)]), X


class TargetStep(keras.Sequential):
    """Lets a frozen layer follow another, as reinforcement learning does."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.layers[1].kernel.assign(0.9 * self.layers[1].kernel + 0.1 * self.layers[0].kernel)
        return logs


def frozen():
    model = TargetStep([keras.Input((12,)), *(layers.Dense(12) for _ in range(3)), layers.Dense(3)])
    model.layers[1].trainable = model.layers[2].trainable = False
    return model, X


MODELS = {
    "dense": dense,
    "recurrent": recurrent,
    "tied": tied,
    "stateful": stateful,
    "own_step": own_step,
    "frozen": frozen,
}


class Assigns(keras.callbacks.Callback):
    """Changes a weight between two steps, and evaluates."""

    def __init__(self, x):
        super().__init__()
        self._x = x

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            weight = self.model.trainable_variables[0]
            weight.assign(0.9 * weight.value)
            self.model.predict(self._x[:3], verbose=0)


def train(strategy, name):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, x = MODELS[name]()
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0, use_ema=True)
        optimizer.ema_overwrite_frequency = None if name == "own_step" else 3
        model.compile(optimizer, CROSSENTROPY, metrics=None if name == "own_step" else ["accuracy"])
    given = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit(x, Y, callbacks=[Assigns(x)], **given).history
    results = {f"log_{key}": np.array(values) for key, values in history.items()}
    results |= {f"{i}_{v.path}": v.numpy() for i, v in enumerate(model.weights)}
    results["evaluated"] = np.array(model.evaluate(x[:18], Y[:18], batch_size=16, verbose=0))
    # Of three rows, one pipeline gets one.
    results["predicted"] = model.predict(x[:19], batch_size=16, verbose=0)
    return results


def alone(case):
    """What one process, or one pipeline of as many micro-batches, makes of a case."""
    if case == "stateful":
        everything = startup.local_devices()
        startup.local_devices = lambda: everything[:2]
        return train(psp.PipelineStrategy(4), case)
    with psp.single_process(), references.built_first():
        return train(tf.distribute.get_strategy(), case)


def main():
    _, schedule, *cases = sys.argv
    options = {"pipelines": 2, "schedule": schedule, "startup_timeout": 60}
    if "TF_CONFIG" not in os.environ:
        logical_devices(4)
    strategy = psp.PipelineStrategy(2, **options)
    for case in cases:
        if case == "writes":
            slow_writes.check(strategy)
            continue
        found = train(strategy, case)
        print(strategy.plan)
        for key, value in alone(case).items():
            np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-5, err_msg=key)
        print(f"{case} is equal", flush=True)


if __name__ == "__main__":
    main()
