"""Trains in stages on four devices of this process, and prints what was counted as JSON."""

import json

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cluster.in_process import logical_devices
from keras_psplus.pipeline import startup

ROWS, INPUTS, WIDTH, CLASSES = 40, 64, 96, 10
# Of the sequences of each batch.
LENGTHS = (3, 5, 7)


def dense():
    stack = [keras.layers.Dense(WIDTH, name=name) for name in "abc"]
    stack.append(keras.layers.Dense(CLASSES, name="d"))
    model = keras.Sequential([keras.Input((INPUTS,)), *stack], name="stack")
    x, y = np.ones((ROWS, INPUTS), "float32"), np.zeros(ROWS)
    # Batches of 32 rows and of 8.
    return model, tf.data.Dataset.from_tensor_slices((x, y)).batch(32)


def residual():
    a, b, c = (keras.layers.Dense(WIDTH, name=name) for name in "abc")
    inputs = keras.Input((INPUTS,))
    h = a(inputs)
    h = h + c(b(h))
    h = h + c(h)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="d")(h))
    return model, dense()[1]


def of_sequences():
    stack = [keras.layers.Embedding(50, WIDTH, name="a"), keras.layers.LayerNormalization(name="b")]
    stack += [keras.layers.Dense(WIDTH, name="c"), keras.layers.Dense(CLASSES, name="d")]

    def batches():
        for length in LENGTHS:
            yield np.zeros((ROWS, length), "int32"), np.zeros((ROWS, length), "int32")

    spec = tf.TensorSpec([ROWS, None], tf.int32)
    data = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    return keras.Sequential(stack), data.apply(tf.data.experimental.assert_cardinality(3))


CASES = {
    "gpipe": {},
    "1f1b": {"schedule": "1f1b"},
    "pipedream": {"schedule": "pipedream"},
    "bf16": {"activation_compression": "bf16"},
    "residual": {"make": residual},
    "sequences": {"make": of_sequences},
    "pipelines": {"pipelines": 2},
    "int8": {"pipelines": 2, "schedule": "1f1b", "compression": "int8"},
}


def train(devices, make=dense, schedule="gpipe", **options):
    startup.local_devices = lambda: devices[: 2 * options.get("pipelines", 1)]
    keras.backend.clear_session()
    strategy = psp.PipelineStrategy(
        2, stages=[["a", "b"], ["c", "d"]], schedule=schedule, **options
    )
    with strategy.scope():
        model, data = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(global_clipnorm=1.0), loss, metrics=["accuracy"])
    monitor = psp.callbacks.CommunicationMonitor()
    logs = model.fit(data, validation_data=data, callbacks=[monitor], verbose=0).history
    model.predict(data, verbose=0)
    rows = [
        (t.path, t.direction, t.compressor, t.logical_bytes, t.compressed_bytes, t.wire_bytes)
        for t in strategy.communication.traffic()
    ]
    return {"rows": rows, "bytes": logs["comm/bytes"], "ratio": logs["comm/ratio"]}


def main():
    logical_devices(4)
    devices = startup.local_devices()
    print(json.dumps({name: train(devices, **options) for name, options in CASES.items()}))


if __name__ == "__main__":
    main()
