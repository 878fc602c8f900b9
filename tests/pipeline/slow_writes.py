"""Weights that a callback writes while their workers have something else to do first."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(24, 12).astype("float32"), RANDOM.randint(0, 3, 24)


def delay(variable):
    """Has the worker that has a variable compute for a tenth of a second before anything else."""
    with tf.device(variable.value.device):
        product = tf.zeros((1000, 1000))
        for _ in range(4):
            # `tf.matmul` would wait for the shape.
            product = tf.raw_ops.MatMul(a=product, b=product)


class SlowWrites(keras.callbacks.Callback):
    """Reads all weights after each step, and writes them."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_train_batch_end(self, batch, logs=None):
        # Half of the steps' length, from the next step on.
        rate = self.model.optimizer.learning_rate
        rate.assign(0.5 * float(rate))
        self.read.append(self.model.get_weights())
        # Last: who reads waits for what the worker was asked before.
        for variable, value in zip(self.model.weights, self.read[-1]):
            delay(variable)
            variable.assign(0.8 * value)


def written():
    """Trains; returns the model, its losses, and the weights after each step."""
    model = keras.Sequential([layers.Dense(8), layers.Dense(8, "tanh"), layers.Dense(3)])
    model.build((None, 12))
    # Not trained: with several pipelines, a step does not send it to the copies.
    model.layers[1].trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss)
    callback = SlowWrites()
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [callback]}
    history = model.fit(X, Y, **options).history
    read = [one for weights in callback.read for one in weights]
    return model, {**history, **{f"read/{i}": one for i, one in enumerate(read)}}
