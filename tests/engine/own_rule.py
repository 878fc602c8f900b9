"""An update rule and a compressor of a user's own, in one file.

own_rule.py all_reduce|parameter_server

Prints the weights of a model of which every second batch trains it, twice as much.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp


class EverySecond(psp.updates.Updates):
    """Applies the gradients of every second batch, twice as large, and drops the others."""

    on_parameter_servers = True

    def on_replica(self, context):
        return OnReplica(context.states.variable(f"{context.name} batches", [], tf.int64))


class OnReplica(psp.updates.ReplicaUpdates):
    def __init__(self, batches):
        self._batches = batches

    def on_gradients(self, step, grads, variables, apply):
        self._batches.assign_add(1, read_value=False)
        is_odd = self._batches.read_value() % 2 == 1
        doubled = [psp.updates.map_values(lambda v: 2 * v, grad) for grad in grads]
        tf.cond(is_odd, lambda: apply(doubled, variables), lambda: None)


class Double(psp.compression.Compressor):
    """Sends float64, which loses nothing."""

    def encode(self, tensor, state, step):
        return (tf.cast(tensor, tf.float64),), state

    def decode(self, payload, shape, dtype, step):
        return tf.reshape(tf.cast(payload[0], dtype), shape)

    def wire_bytes(self, shape, dtype, step=None):
        return 8 * tf.TensorShape(shape).num_elements()


def main():
    kinds = {
        "all_reduce": psp.MultiWorkerMirroredStrategy,
        "parameter_server": psp.ParameterServerStrategy,
    }
    strategy = kinds[sys.argv[1]](updates=EverySecond(), compression=Double())
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "linear", False)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        rows = keras.Sequential([keras.Input(()), keras.layers.Embedding(3, 1)])
        rows.compile(keras.optimizers.SGD(0.1), "mse")
    rows.set_weights([np.array([[2.0], [3.0], [4.0]])])
    data = tf.data.Dataset.from_tensor_slices((tf.range(12) % 3, tf.ones((12, 1)))).batch(2)
    rows.fit(data, epochs=1, verbose=0)
    print("rows", json.dumps(rows.get_weights()[0].ravel().tolist()), flush=True)
    model.set_weights([np.array([[1.0], [2.0]])])
    x = tf.reshape(tf.range(24, dtype=tf.float32), (12, 2)) / 24
    data = tf.data.Dataset.from_tensor_slices((x, tf.ones((12, 1)))).batch(2)
    model.fit(data, epochs=1, verbose=0)
    print("weights", json.dumps(model.get_weights()[0].ravel().tolist()), flush=True)


if __name__ == "__main__":
    main()
