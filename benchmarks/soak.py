"""Goodput of a job whose workers are killed, again and again, and what its restarts take.

    python benchmarks/soak.py --seconds 1200 --every 60

Every so many seconds (drawn by the seed, between half and one and a half of it), one worker is
killed by SIGKILL, as soon as the job has taken a new step; the launcher starts the job again, which
goes on from its last backup. The goodput is the time that the job's steps would have taken without
faults, as a part of the time that all took: steps that were trained twice count once. A step has
`--pause` milliseconds more than it computes, as steps on a larger model would have.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time

BEGAN = time.time()
PARTS = ("killed to started", "imports", "strategy", "to fit", "to first step", "to new step")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--every", type=float, default=60, help="seconds from fault to fault")
    parser.add_argument("--save_freq", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=20, help="milliseconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        train(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        events, restarts = soak(args, pathlib.Path(folder))
    report(events, restarts, args.seconds)


def soak(args, folder):
    """Runs the job with its faults; returns the chief's events, and how often it was killed."""
    from keras_psplus.cluster import restarts
    from keras_psplus.cluster.processes import LocalCluster

    draw, end = random.Random(args.seed), time.time() + args.seconds
    events, kills = folder / "events.jsonl", []
    events.touch()
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}

    def disturb(cluster, restart):
        time.sleep(draw.uniform(0.5, 1.5) * args.every)
        newest = max((e["step"] for e in read(events) if e["restart"] < restart), default=0)
        while not any(e["step"] > newest for e in read(events) if e["restart"] == restart):
            time.sleep(0.1)
        if time.time() < end:
            kills.append(time.time())
            os.kill(cluster.pids[f"worker-{draw.randrange(args.workers)}"], signal.SIGKILL)

    def make_cluster(restart):
        cluster = LocalCluster(
            command,
            args.workers,
            env={**env, "SOAK_ENDS": str(end), "SOAK_RESTART": str(restart)},
            log_dir=folder,
            restart=restart,
            failure_grace=5,
        )
        threading.Thread(target=disturb, args=(cluster, restart), daemon=True).start()
        return cluster

    result = restarts.run(make_cluster, 1000, timeout=args.seconds + 120)
    if result.exit_code != 0:
        raise SystemExit(result.tails())
    return read(events), kills


def read(path):
    """The lines of JSON of a file that are whole."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def report(events, kills, seconds):
    """Prints the goodput, and what the parts of restarts took."""
    steps = [event for event in events if event["step"]]
    gaps = [
        b["time"] - a["time"]
        for a, b in zip(steps, steps[1:])
        if a["restart"] == b["restart"] and b["step"] == a["step"] + 1
    ]
    step, newest = statistics.median(gaps), max(event["step"] for event in steps)
    print(f"{newest} steps of {1000 * step:.0f} ms in {seconds:.0f} s, {len(kills)} kills")
    print(f"goodput: {100 * newest * step / seconds:.0f} %; steps trained twice: ", end="")
    print(len(steps) - len({event["step"] for event in steps}))
    rows = []
    for restart, killed in enumerate(kills, 1):
        own = [event for event in events if event["restart"] == restart]
        before = max(e["step"] for e in steps if e["restart"] < restart)
        new = [event["time"] for event in own if event["step"] > before]
        if new:
            first = min(event["time"] for event in own if event["step"])
            times = [killed, *own[0]["marks"], first, new[0]]
            rows.append([b - a for a, b in zip(times, times[1:])])
    if rows:
        print(f"from the kill to a new step: {statistics.median(map(sum, rows)):.1f} s (median)")
        for part, values in zip(PARTS, zip(*rows), strict=True):
            print(f"  {part}: {statistics.median(values):.1f} s")


def train(args):
    """One worker."""
    import keras
    import numpy as np

    import keras_psplus as psp

    imported = time.time()
    strategy = psp.MultiWorkerMirroredStrategy()
    formed, restart = time.time(), int(os.environ["SOAK_RESTART"])
    random_numbers = np.random.default_rng(0)
    x = random_numbers.standard_normal((64 * 100, 64), np.float32)
    y = random_numbers.integers(0, 10, len(x))
    with strategy.scope():
        layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    folder = pathlib.Path(args.folder)

    class Note(keras.callbacks.Callback):
        def _note(self, step, **more):
            if strategy.is_chief:
                with open(folder / "events.jsonl", "a") as file:
                    line = {"restart": restart, "step": step, "time": time.time(), **more}
                    file.write(json.dumps(line) + "\n")

        def on_train_begin(self, logs=None):
            self._note(0, marks=[BEGAN, imported, formed, time.time()])

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(args.pause / 1000)
            self._note(int(self.model.optimizer.iterations.numpy()))

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = time.time() > float(os.environ["SOAK_ENDS"])

    backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=args.save_freq)
    model.fit(x, y, 64, 1_000_000, 0, [backup, Note()])


if __name__ == "__main__":
    main()
