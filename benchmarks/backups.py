"""Cost of `BackupAndRestore(save_freq=)`, with a dense model on two workers.

Each worker has one core.

    python benchmarks/backups.py

The model is the dense one of the lab (4.95 million parameters, 64 rows a worker) with Adam, whose
slots are twice the weights. Calls of `fit` without backups and with them take turns in one job,
over the loopback: steps are shorter than on a network, and what a backup costs is a larger part of
them. Backups come often, so that they show. Prints milliseconds a step of each call, and the cost
of one backup as a part of the time of 100 steps.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

from keras_psplus.cluster.processes import LocalCluster


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=96, help="steps of a call of fit")
    parser.add_argument("--save_freq", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--compression", help="whose residuals each worker writes as well")
    args = parser.parse_args()
    if "TF_CONFIG" in os.environ:
        train(args)
        return
    command = [sys.executable, __file__, *sys.argv[1:]]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as log_dir:
        with LocalCluster(command, 2, env=environment, log_dir=log_dir) as cluster:
            end = cluster.wait(600)
        if end.exit_code != 0:
            raise SystemExit(end.tails())
        for line in end.logs["worker-0"].splitlines():
            if line.startswith("result: "):
                print(line.removeprefix("result: "))


def train(args):
    """One worker: trains in turns, and the first one prints the times."""
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[index % len(cores)]])

    import keras
    import numpy as np

    import keras_psplus as psp

    strategy = psp.MultiWorkerMirroredStrategy(compression=args.compression)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128 * 8, 784), np.float32)
    y = rng.integers(0, 10, len(x))
    with strategy.scope():
        layers = [keras.layers.Dense(width, "relu") for width in (1600, 1600, 700)]
        model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss)

    class Times(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.times.append(time.perf_counter())

        def on_train_begin(self, logs=None):
            self.times = []

    def milliseconds(epochs, *callbacks):
        # The start of `fit`, and its end, at which the last backup is waited for, are not steps.
        times = Times()
        model.fit(x, y, 128, epochs, 0, [*callbacks, times])
        return 1000 * (times.times[-1] - times.times[0]) / (len(times.times) - 1)

    epochs = -(-args.steps // 8)
    milliseconds(2)
    found = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.turns):
            found["without"].append(milliseconds(epochs))
            backup = keras.callbacks.BackupAndRestore(
                pathlib.Path(folder, "backup"), save_freq=args.save_freq
            )
            found["with"].append(milliseconds(epochs + 1, backup))
    if strategy.is_chief:
        medians = {name: statistics.median(values) for name, values in found.items()}
        for name, values in found.items():
            print(f"result: {name} backups: {[round(v, 1) for v in values]} ms a step", flush=True)
        each = args.save_freq * (medians["with"] - medians["without"])
        cost = each / medians["without"]
        print(f"result: {each:.0f} ms for each backup: {cost:.1f} % at every 100 steps", flush=True)


if __name__ == "__main__":
    main()
