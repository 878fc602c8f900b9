"""One process of `step_time.py`, which trains a model and prints its step times.

The data are the digits.

Run with TF_CONFIG it is one worker of a cluster. Both libraries run the code below; only the
module that `keras` names and the strategy differ.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

import numpy as np
import tensorflow as tf

DIGITS = pathlib.Path(__file__).parent.parent / "examples" / "digits.npz"


def make_strategy(library):
    if "TF_CONFIG" not in os.environ:
        return tf.distribute.get_strategy()
    if library == "tf_keras":
        return tf.distribute.MultiWorkerMirroredStrategy()
    import keras_psplus

    return keras_psplus.MultiWorkerMirroredStrategy()


def take_cores(shares):
    """Stays on this worker's share of the cores; one process alone takes the first share."""
    index = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)
    cores = sorted(os.sched_getaffinity(0))
    shares = min(shares, len(cores))
    mine = cores[index % shares :: shares]
    os.sched_setaffinity(0, mine)
    tf.config.threading.set_intra_op_parallelism_threads(len(mine))
    # With a single one, an operation that waits for a peer would hold up all others.
    tf.config.threading.set_inter_op_parallelism_threads(max(2, len(mine)))


def build_model(keras):
    """A small convolutional network: 356,000 weights, so 1.4 MB of gradients each step.

    Its steps take milliseconds, so that what the strategies add to them shows.
    """
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(128, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_dataset(batch_size):
    with np.load(DIGITS) as file:
        x = file["x"].reshape(-1, 8, 8, 1).astype("float32") / 16
        y = file["y"].astype("int64")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).repeat()
    options = tf.data.Options()
    # What AUTO falls back to for data in memory, without its warning.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.batch(batch_size, drop_remainder=True).prefetch(2).with_options(options)


def measure(keras, strategy, batch_size, steps_per_execution, warmup, steps):
    """Trains one model and returns its step times in milliseconds, without the first ones."""
    stamps = []

    class Stamps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            stamps.append(time.perf_counter())

    with strategy.scope():
        model = build_model(keras)
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )
    history = model.fit(
        make_dataset(batch_size),
        steps_per_epoch=warmup + steps,
        epochs=1,
        verbose=0,
        callbacks=[Stamps()],
    )
    skipped = warmup // steps_per_execution - 1
    # A callback call ends `steps_per_execution` steps: their mean is one measurement.
    calls = np.diff(stamps[skipped:]) * 1000 / steps_per_execution
    return {
        "batch_size": batch_size,
        "steps_per_execution": steps_per_execution,
        "calls": [round(ms, 4) for ms in calls.tolist()],
        "median": statistics.median(calls.tolist()),
        "mean": float(np.mean(calls)),
        "loss": float(history.history["loss"][-1]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=["tf_keras", "keras"], required=True)
    parser.add_argument("--batch_sizes", type=int, nargs="+", required=True)
    parser.add_argument("--steps_per_execution", type=int, nargs="+", required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--shares", type=int, required=True, help="parts to split the cores into")
    parser.add_argument("--processes", type=int, required=True, help="1: train without a cluster")
    args = parser.parse_args()
    take_cores(args.shares)
    if args.processes == 1:
        os.environ.pop("TF_CONFIG", None)

    # The strategy comes first: it starts TensorFlow's server, before any variable exists.
    strategy = make_strategy(args.library)
    if args.library == "tf_keras":
        import tf_keras as keras
    else:
        import keras

    for steps_per_execution in args.steps_per_execution:
        for batch_size in args.batch_sizes:
            keras.utils.set_random_seed(1)
            result = measure(
                keras, strategy, batch_size, steps_per_execution, args.warmup, args.steps
            )
            result.update(
                library=args.library,
                replicas=strategy.num_replicas_in_sync,
                versions={"tensorflow": tf.__version__, args.library: keras.__version__},
            )
            print("result: " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
