"""An update rule and a compressor of one's own: own_rule.py all_reduce|parameter_server."""

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


if __name__ == "__main__":
    kinds = {"all_reduce": psp.MultiWorkerMirroredStrategy}
    kind = kinds.get(sys.argv[1], psp.ParameterServerStrategy)
    strategy = kind(updates=EverySecond(), compression=Double())
    x = tf.reshape(tf.range(24, dtype=tf.float32), (12, 2)) / 24
    for kind, inputs, start in (("rows", tf.range(12) % 3, [2, 3, 4]), ("weights", x, [1, 2])):
        with strategy.scope():
            dense = keras.layers.Dense(1, use_bias=False)
            layer = keras.layers.Embedding(3, 1) if kind == "rows" else dense
            model = keras.Sequential([keras.Input(inputs.shape[1:]), layer])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.set_weights([np.array(start, "float32")[:, None]])
        data = tf.data.Dataset.from_tensor_slices((inputs, tf.ones((12, 1)))).batch(2)
        model.fit(data, epochs=1, verbose=0)
        print(kind, model.get_weights()[0].ravel().tolist(), flush=True)
