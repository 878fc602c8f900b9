"""Bytes and accuracy of HybridStrategy with copies of hot rows, and without.

    python benchmarks/row_cache.py [--workers 2] [--steps 600] [--seeds 1 2 3]

The lab's sparse model (a table of 200,000 x 32, 26 ids after Zipf's law for each of 256 examples of
a worker) learns classes that a hidden table makes of the ids. Each setting is a job of its own for
each seed of the weights and of the training data; what is printed is the mean over the seeds.
Beside what `strategy.communication` counts for rows stands what the kernel counts on the loopback
for all tasks together, gradients of dense weights and all else included.

As root, everything runs in a network namespace of its own, so that nobody else's bytes are counted.
"""

import argparse
import json
import os

from lab import counted_job

ROWS, DIM, IDS, BATCH, CLASSES, EXPONENT = 200_000, 32, 26, 256, 10, 1.1
TESTED = 20_000


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


def measure(rows, staleness, optimizer, steps, seed):
    """Trains on this worker, and prints what comes of it."""
    import keras
    import tensorflow as tf

    import keras_psplus as psp

    cache = psp.tables.Cache(rows, staleness=staleness) if rows else None
    strategy = psp.HybridStrategy(placement={"*": "parameter_server"}, cache=cache)
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        ids = keras.Input((IDS,), dtype="int64")
        embedded = keras.layers.Embedding(ROWS, DIM)(ids)
        summed = keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, 1))(embedded)
        hidden = keras.layers.Dense(64, activation="relu")(summed)
        model = keras.Model(ids, keras.layers.Dense(CLASSES)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.get(json.loads(optimizer)), loss, metrics=["accuracy"])
    size = BATCH * strategy.num_workers
    data = tf.data.Dataset.from_tensor_slices(batches(size, steps, 100 * seed)).batch(size)
    before = counted_job.loopback_bytes()
    model.fit(data, verbose=0)
    sent = (counted_job.loopback_bytes() - before) / steps
    counted = {
        t.direction: t.wire_bytes / steps
        for t in strategy.communication.traffic()
        if "emb" in t.path
    }
    tested = tf.data.Dataset.from_tensor_slices(batches(TESTED, 1, 3)).batch(2048)
    accuracy = model.evaluate(tested, verbose=0)[1]
    result = {"accuracy": accuracy, "sent": sent, **counted}
    if strategy.is_chief:
        counted_job.print_result(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--staleness", type=int, nargs="+", default=[10, 100])
    parser.add_argument(
        "--optimizer",
        default='{"class_name": "SGD", "config": {"learning_rate": 0.5}}',
        help="a Keras optimizer's configuration",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    counted_job.add_flags(parser, timeout=900)
    args = parser.parse_args()
    counted_job.move_into_own_network(args)
    columns = "rows read, KB a step", "gradients of rows", "of no cache", "loopback", "test"
    print(f"| `cache=` | {' | '.join(columns)} (beside None, each seed) |")
    print("|---|---|---|---|---|---|")
    whole, without = None, None
    for rows, staleness in [(0, 0), *((args.rows, s) for s in args.staleness)]:
        jobs = []
        for seed in args.seeds:
            setting = rows, staleness, args.optimizer, args.steps, seed
            jobs.append(
                counted_job.launch(
                    __file__, args.workers, args.ps, args.timeout, SETTING=json.dumps(setting)
                )
            )
        found = {name: sum(job[name] for job in jobs) / len(jobs) for name in jobs[0]}
        both = found["pull"] + found["gradient"]
        whole = whole or both
        what = f"Cache({rows}, staleness={staleness})" if rows else "None"
        cells = [f"{found[name] / 1e3:.1f}" for name in ("pull", "gradient")]
        cells += [f"{100 * both / whole:.0f} %", f"{found['sent'] / 1e3:.1f}"]
        tests = [100 * job["accuracy"] for job in jobs]
        without = without or tests
        each = ", ".join(f"{own - other:+.2f}" for own, other in zip(tests, without))
        cells += [f"{100 * found['accuracy']:.2f} % ({each})"]
        print(f"| `{what}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    measure(*json.loads(os.environ["SETTING"])) if "TF_CONFIG" in os.environ else main()
