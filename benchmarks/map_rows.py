"""Speed of an expensive `map` whose rows are divided between two workers.

It is compared with a `map` of which each worker runs all rows.

    python benchmarks/map_rows.py --out map_rows.json

Every process has a core of its own. `own rows` is the pipeline `map().batch()`; `all rows` has
another map behind the batch, so that every worker runs all of it, as any that cannot be divided.
Each line is one job: rows per second of an epoch, by epoch, and how far weights and losses are from
those of one process at most. `--milliseconds 0` has a map that costs next to nothing.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

JOBS = {"one process": 1, "own rows": 2, "all rows": 2}
RESULT = "result: "


def costly(x, y, turns):
    """Some products of matrices, which change nothing but the row's scale."""
    import tensorflow as tf

    if isinstance(turns, int) and not turns:
        return x * 0.5, y
    matrix = tf.zeros([64, 64]) + x
    _, matrix = tf.while_loop(
        lambda i, _: i < turns, lambda i, m: (i + 1, tf.tanh(m @ m)), (0, matrix)
    )
    return x * 0.5 + tf.reduce_mean(matrix), y


def turns_for(milliseconds):
    """Number of products that take `milliseconds` on this core."""
    import tensorflow as tf

    @tf.function
    def run(x, turns):
        return costly(x, 0, turns)[0]

    x, probe = tf.ones([64]), 200
    run(x, tf.constant(probe))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run(x, tf.constant(probe)).numpy()
        times.append(time.perf_counter() - begin)
    return max(1, round(probe * milliseconds / 1e3 / statistics.median(times)))


def task(args):
    """Runs one worker on one core, or with `--calibrate` counts a row's products."""
    index = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    if args.calibrate:
        print(f"{RESULT}{turns_for(args.milliseconds)}", flush=True)
        return
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_psplus as psp

    strategy = psp.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(args.rows, 64)).astype("float32")
    y = rng.integers(0, 10, args.rows).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.shuffle(args.rows, seed=1, reshuffle_each_iteration=False)
    data = data.map(lambda x, y: costly(x, y, args.turns), num_parallel_calls=tf.data.AUTOTUNE)
    data = data.batch(args.batch_size)
    if args.job == "all rows":
        data = data.map(lambda x, y: (x, y))
    with strategy.scope():
        layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
    marks = []
    mark = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: marks.append(time.perf_counter()),
        on_epoch_end=lambda epoch, logs: marks.append(time.perf_counter()),
    )
    history = model.fit(data, epochs=args.epochs, verbose=0, callbacks=[mark])
    if strategy.is_chief:
        weights = np.concatenate([w.ravel() for w in model.get_weights()])
        found = {
            "rows_per_second": [args.rows / (e - b) for b, e in zip(marks[::2], marks[1::2])],
            "weights": weights.tolist(),
            "logs": [*history.history["loss"], *history.history["accuracy"]],
        }
        print(f"{RESULT}{json.dumps(found)}", flush=True)


def launch(job, *args):
    from keras_psplus.cluster.processes import LocalCluster

    command = [sys.executable, __file__, "--job", job, *map(str, args)]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        workers = JOBS.get(job, 1)
        with LocalCluster(command, workers, env=environment, log_dir=folder) as cluster:
            end = cluster.wait(300)
        if end.exit_code != 0:
            raise RuntimeError(f"{end.tails()}\nReceived: exit code {end.exit_code}")
        lines = end.logs["worker-0"].splitlines()
    results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    said = [line for line in lines if "data over" in line]
    return json.loads(results[-1]), said


def furthest(found, other):
    """Largest differences between the weights and the logs of two jobs."""
    return [
        max(abs(a - b) for a, b in zip(found[key], other[key], strict=True))
        for key in ("weights", "logs")
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--milliseconds", type=float, default=5.0, help="of the map, for one row")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3, help="of which the first is not counted")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        task(args)
        return
    turns = 0
    if args.milliseconds:
        turns, _ = launch("one process", "--calibrate", "--milliseconds", args.milliseconds)
    given = ["--rows", args.rows, "--batch_size", args.batch_size, "--epochs", args.epochs]
    results = []
    for _ in range(args.rounds):
        alone = None
        for job in JOBS:
            found, said = launch(job, *given, "--turns", turns)
            alone = alone or found
            speeds = found["rows_per_second"][1:]
            factor = statistics.median(speeds) / statistics.median(alone["rows_per_second"][1:])
            result = {"job": job, "turns": turns, "rows_per_second": speeds, "factor": factor}
            result["furthest"] = furthest(found, alone)
            results.append(result)
            shown = ", ".join(f"{speed:.0f}" for speed in speeds)
            print(f"{job:12} {shown} rows/s, {factor:.2f} of one process; ", end="")
            weights, logs = result["furthest"]
            print(f"weights within {weights:.1e}, logs within {logs:.1e}", *said, flush=True)
    if args.out:
        args.out.write_text(json.dumps({"milliseconds": args.milliseconds, "results": results}))


if __name__ == "__main__":
    main()
