"""Growth of start-up, step time and memory with the number of real tasks.

The model is tiny, and all tasks share this machine's cores.

    python benchmarks/scale_jobs.py --strategies all_reduce --workers 1 2 4 8
    python benchmarks/scale_jobs.py --strategies async sync --workers 1 --steps 100000 \\
        --steps_per_execution 10 --timeout 3600

`start` is what making the strategy takes, once TensorFlow has been imported; `first step` what
comes from there to the end of the first step, with tracing. A step has 8 rows of 8 numbers for
each worker. Memory is what a process holds (RSS): the most of all at the end, what each gains from
a fifth of the steps on, and from three fifths on.
"""

import argparse
import bisect
import json
import os
import pathlib
import sys
import tempfile
import threading
import time

STRATEGIES = ("all_reduce", "async", "sync", "hybrid")
PREFIX = "result: "


def train(args):
    """One task: trains and prints when it was where."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_psplus as psp

    makers = {
        "all_reduce": psp.MultiWorkerMirroredStrategy,
        "async": psp.ParameterServerStrategy,
        "sync": lambda: psp.ParameterServerStrategy(mode="sync"),
        "hybrid": psp.HybridStrategy,
    }
    began = time.monotonic()
    strategy = makers[args.task]()
    made = time.monotonic()
    rows = 8 * args.workers[0]
    rng = np.random.default_rng(0)
    layers = [keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)]
    x = rng.random((rows, 8), "float32")
    if args.task == "hybrid":
        x = rng.integers(0, 1000, (rows, 4)).astype("int32")
        layers[:1] = [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(1000, 8),
            keras.layers.Flatten(),
        ]
    dataset = tf.data.Dataset.from_tensors((x, rng.random((rows, 1), "float32"))).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    ends = {}

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 in (args.steps_per_execution, args.steps // 5, args.steps // 5 * 3):
                ends[batch + 1] = time.monotonic()

        def on_epoch_end(self, epoch, logs=None):
            ends[args.steps] = time.monotonic()

    with strategy.scope():
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", steps_per_execution=args.steps_per_execution)
    model.fit(
        dataset.with_options(options),
        steps_per_epoch=args.steps,
        verbose=0,
        callbacks=[Ends()],
    )
    times = [began, made, *sorted(ends.values())]
    print(PREFIX + json.dumps(times), flush=True)


def resident(pid):
    """MB that a process holds."""
    try:
        pages = pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0.0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def launch(args, strategy, workers):
    """Runs one job; returns its row of the table."""
    from keras_psplus.cluster.processes import LocalCluster

    servers = 0 if strategy == "all_reduce" else 1
    command = [sys.executable, __file__, "--task", strategy, "--workers", str(workers)]
    command += ["--steps", str(args.steps)]
    command += ["--steps_per_execution", str(args.steps_per_execution)]
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    samples, ended = {}, threading.Event()
    with tempfile.TemporaryDirectory() as log_dir:
        cluster = LocalCluster(
            command,
            workers,
            servers,
            chief=strategy in ("async", "sync"),
            env=env,
            log_dir=log_dir,
        )
        with cluster:

            def sample():
                while not ended.wait(0.25):
                    for task, pid in cluster.pids.items():
                        samples.setdefault(task, []).append((time.monotonic(), resident(pid)))

            thread = threading.Thread(target=sample)
            thread.start()
            try:
                end = cluster.wait(args.timeout)
            finally:
                ended.set()
                thread.join()
        if end.exit_code:
            raise RuntimeError(f"{end.tails()}\nReceived: exit code {end.exit_code}")
        lead = "chief-0" if "chief-0" in end.logs else "worker-0"
        (line,) = [one for one in end.logs[lead].splitlines() if one.startswith(PREFIX)]
    began, made, first, fifth, middle, last = json.loads(line.removeprefix(PREFIX))
    steps = args.steps - args.steps // 5

    def held(task, moment):
        return samples[task][bisect.bisect(samples[task], (moment, 0.0)) - 1][1]

    held_last = {task: held(task, last) for task in samples}
    gains = {task: (held_last[task] - held(task, fifth)) * 1000 / steps for task in samples}
    late = {task: (held_last[task] - held(task, middle)) * 2000 / steps for task in samples}
    gained = ", ".join(f"{task} {gains[task]:.3f}, {late[task]:.3f}" for task in sorted(samples))
    return (
        f"| {strategy} | {workers} | {servers} | {made - began:.1f} | {first - made:.1f} "
        f"| {(last - fifth) * 1000 / steps:.2f} | {max(held_last.values()):.0f} | {gained} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["all_reduce"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--steps_per_execution", type=int, default=1, help="a divisor of a fifth")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each launch")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        train(args)
        return
    print(
        "| strategy | workers | ps | start: s | first step: s | ms of a step | MB of a process "
        "| MB gained in 1,000 steps: from a fifth on, from three fifths on |"
    )
    print("|---|" + "---:|" * 6 + "---|", flush=True)
    for strategy in args.strategies:
        for workers in args.workers:
            print(launch(args, strategy, workers), flush=True)


if __name__ == "__main__":
    main()
