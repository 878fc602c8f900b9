"""Bytes and accuracy of HybridStrategy with copies of hot rows, and without.

    python benchmarks/row_cache.py [--workers 2] [--steps 600]

The lab's sparse model (a table of 200,000 x 32, 26 ids after Zipf's law for each of 256 examples of
a worker) learns classes that a hidden table makes of the ids. Each setting is a job of its own.
Beside what `strategy.communication` counts for rows stands what the kernel counts on the loopback
for all tasks together, gradients of dense weights and all else included.

As root, everything runs in a network namespace of its own, so that nobody else's bytes are counted.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

INTERFACES = pathlib.Path("/proc/net/dev")  # those of one's own namespace
ROWS, DIM, IDS, BATCH, CLASSES, EXPONENT = 200_000, 32, 26, 256, 10, 1.1
TESTED = 20_000


def loopback_bytes():
    lines = INTERFACES.read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split()[9])


def batches(size, count, seed):
    """Ids and labels."""
    import numpy as np

    hidden, rng = np.random.default_rng(1), np.random.default_rng(seed)
    meanings = hidden.standard_normal((ROWS, CLASSES)).astype("float32")
    places = hidden.permutation(ROWS)
    weight = 1 / np.arange(1, ROWS + 1) ** EXPONENT
    cumulated = np.cumsum(weight / weight.sum())
    ids = places[np.minimum(np.searchsorted(cumulated, rng.random((count * size, IDS))), ROWS - 1)]
    return ids, meanings[ids].sum(1).argmax(1)


def measure(rows, staleness, optimizer, steps):
    """Trains on this worker, and prints what comes of it."""
    import keras
    import tensorflow as tf

    import keras_psplus as psp

    cache = psp.tables.Cache(rows, staleness=staleness) if rows else None
    strategy = psp.HybridStrategy(placement={"*": "parameter_server"}, cache=cache)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids = keras.Input((IDS,), dtype="int64")
        embedded = keras.layers.Embedding(ROWS, DIM)(ids)
        summed = keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, 1))(embedded)
        hidden = keras.layers.Dense(64, activation="relu")(summed)
        model = keras.Model(ids, keras.layers.Dense(CLASSES)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.get(json.loads(optimizer)), loss, metrics=["accuracy"])
    size = BATCH * strategy.num_workers
    data = tf.data.Dataset.from_tensor_slices(batches(size, steps, 2)).batch(size)
    before = loopback_bytes()
    model.fit(data, verbose=0)
    sent = (loopback_bytes() - before) / steps
    counted = {
        t.direction: t.wire_bytes / steps
        for t in strategy.communication.traffic()
        if "emb" in t.path
    }
    tested = tf.data.Dataset.from_tensor_slices(batches(TESTED, 1, 3)).batch(2048)
    accuracy = model.evaluate(tested, verbose=0)[1]
    result = {"accuracy": accuracy, "sent": sent, **counted}
    if strategy.is_chief:
        print("result: " + json.dumps(result), flush=True)


def launch(workers, ps, timeout, setting):
    from keras_psplus.cluster.processes import LocalCluster

    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    environment["SETTING"] = json.dumps(setting)
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(
            [sys.executable, __file__], workers, ps, env=environment, log_dir=folder
        )
        with cluster:
            end = cluster.wait(timeout)
        if end.exit_code != 0:
            raise RuntimeError(f"{end.tails()}\nReceived: exit code {end.exit_code}")
        lines = end.logs["worker-0"].splitlines()
    (line,) = [line for line in lines if line.startswith("result: ")]
    return json.loads(line.removeprefix("result: "))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 10, 100])
    parser.add_argument(
        "--optimizer",
        default='{"class_name": "SGD", "config": {"learning_rate": 0.5}}',
        help="a Keras optimizer's configuration",
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each job")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if os.getuid() == 0 and not args.inside:
        command = ["unshare", "--net", sys.executable, *sys.argv, "--inside"]
        sys.exit(subprocess.run(command).returncode)
    if args.inside:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("| `cache=` | rows read, KB a step | gradients of rows | of no cache | loopback | test |")
    print("|---|---|---|---|---|---|")
    whole = None
    for rows, staleness in [(0, 0), *((args.rows, s) for s in args.staleness)]:
        setting = rows, staleness, args.optimizer, args.steps
        found = launch(args.workers, args.ps, args.timeout, setting)
        both = found["pull"] + found["gradient"]
        whole = whole or both
        what = f"Cache({rows}, staleness={staleness})" if rows else "None"
        cells = [f"{found[name] / 1e3:.1f}" for name in ("pull", "gradient")]
        cells += [f"{100 * both / whole:.0f} %", f"{found['sent'] / 1e3:.1f}"]
        print(f"| `{what}` | {' | '.join(cells)} | {100 * found['accuracy']:.2f} % |", flush=True)


if __name__ == "__main__":
    measure(*json.loads(os.environ["SETTING"])) if "TF_CONFIG" in os.environ else main()
