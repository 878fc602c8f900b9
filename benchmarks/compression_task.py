"""One worker of `compression.py` or `updates.py`: trains the MLP and prints what steps cost."""

import json
import os
import statistics
import time

import keras
import netlab
import numpy as np
import tensorflow as tf
from compression_arguments import WIDTHS, parse

import keras_psplus


class Measurement(keras.callbacks.Callback):
    """Notes when steps end, and what was sent between the first and the last that count."""

    def __init__(self, warmup, steps, communication, rank):
        super().__init__()
        self.first, self.last = warmup - 1, warmup + steps - 1
        self.communication, self.rank = communication, rank
        self.stamps = []

    def on_train_batch_end(self, batch, logs=None):
        if batch >= self.first:
            self.stamps.append(time.perf_counter())
        if batch == self.first:
            self.before = self._now()
        if batch == self.last:
            self.after = self._now()

    def _now(self):
        return {
            "sent": netlab.sent_bytes(os.environ["NETLAB_COUNTERS"], self.rank),
            "counted": self.communication.wire_bytes,
            "waited": self.communication.seconds * 1000,
            "processor": time.process_time() * 1000,
        }

    def results(self):
        """Milliseconds of each step, their median, and means per step of all else."""
        steps = len(self.stamps) - 1
        times = (np.diff(self.stamps) * 1000).round(3).tolist()
        per_step = {key: (self.after[key] - self.before[key]) / steps for key in self.after}
        return {"times": times, "median": statistics.median(times), **per_step}


def options(method):
    """What a method's name stands for, as arguments of the strategy."""
    updates = {
        "accumulate": keras_psplus.updates.Accumulate,
        "local_sgd": keras_psplus.updates.LocalSGD,
        "diloco": keras_psplus.updates.DiLoCo,
    }
    name, _, rest = method.partition(":")
    if name in updates:
        every, _, compressor = rest.partition(",")
        return {"updates": updates[name](int(every)), "compression": compressor or None}
    special = {"none": None, "alone": keras_psplus.compression.NoCommunication()}
    return {"compression": special.get(method, method)}


def make_model():
    layers = [keras.layers.Dense(width, activation="relu") for width in WIDTHS[1:-1]]
    model = keras.Sequential([keras.Input(WIDTHS[:1]), *layers, keras.layers.Dense(WIDTHS[-1])])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def make_dataset(batch_size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, WIDTHS[0])).astype("float32")
    y = rng.integers(0, WIDTHS[-1], len(x))
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch_size).prefetch(2)


def main():
    args = parse(__doc__.splitlines()[0])
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": args.addresses},
            "task": {"type": "worker", "index": args.rank},
        }
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # With a single one, an operation that waits for a peer would hold up all others.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = keras_psplus.MultiWorkerMirroredStrategy(
        **options(args.method), bucket_bytes=args.bucket_bytes
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_model()
    measurement = Measurement(args.warmup, args.steps, strategy.communication, args.rank)
    history = model.fit(
        make_dataset(args.batch_size * len(args.addresses)),
        steps_per_epoch=args.warmup + args.steps,
        verbose=0,
        callbacks=[measurement],
    )
    loss = history.history["loss"][-1]
    print("result: " + json.dumps({**measurement.results(), "loss": float(loss)}), flush=True)


if __name__ == "__main__":
    main()
