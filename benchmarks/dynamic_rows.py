"""Speed, by seconds of the processor, and memory of a dynamic table in one process.

python benchmarks/dynamic_rows.py [--keys MILLIONS] [--dim DIM]
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.tables import initial_rows
from keras_psplus.tables.rows.row_optimizer import config_of
from keras_psplus.tables.store import RowStore

BATCH, TRIES = 1 << 16, 8


def resident() -> int:
    """Bytes that this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def best_rate(function: object, batches: list[tf.Tensor]) -> float:
    """Millions of keys a second of the core, the best of several batches."""
    times = []
    for batch in batches:
        begun = time.process_time()
        function(batch)  # type: ignore[operator]
        times.append(time.process_time() - begun)
    return BATCH / min(times) / 1e6


def main() -> None:
    """Prints rates, pauses and bytes a key."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=float, default=2.0, help="millions of keys")
    parser.add_argument("--dim", type=int, default=32)
    flags = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    initializer = initial_rows.check_initializer("uniform")
    spec = {"name": "t", "dim": flags.dim, "initializer": initializer, "default": "zeros"}
    store = RowStore({**spec, "admit": None, "expire": []})
    store.set_optimizer(config_of(keras.optimizers.SGD(), None, None, None))
    gradient = tf.ones([BATCH, flags.dim])

    @tf.function(autograph=False)
    def update(keys: tf.Tensor) -> tf.Tensor:
        rate, none = tf.constant(0.1), tf.zeros([0])
        with tf.control_dependencies(
            [store.apply(keys, gradient, rate, none, tf.constant(0, tf.int64))]
        ):
            return tf.identity(keys[0])

    @tf.function(autograph=False)
    def lookup(keys: tf.Tensor) -> tf.Tensor:
        unique, positions = tf.unique(keys)
        return tf.gather(store.lookup(unique, True), positions)

    random, count = np.random.default_rng(0), int(flags.keys * 1e6) // BATCH
    update(tf.range(BATCH, dtype=tf.int64))
    before, pauses, kept = resident(), [], []
    for i in range(count):
        keys = tf.constant(random.integers(-(2**62), 2**62, BATCH))
        begun = time.process_time()
        update(keys)
        pauses.append(time.process_time() - begun)
        if i >= count - TRIES:
            kept.append(keys)
    taken = (resident() - before) / (count * BATCH)
    print(f"{count * BATCH / 1e6:.1f} M keys of dim {flags.dim}, batches of {BATCH}")
    print(f"inserts and updates {BATCH / np.median(pauses) / 1e6:.2f} M/s")
    usual = np.median(pauses)
    print(f"longest batch {1e3 * max(pauses):.0f} ms, median {1e3 * usual:.0f} ms")
    print(f"bytes a key beside the row: {taken - 4 * flags.dim:.0f}")
    lookup(kept[0])
    print(f"lookups {best_rate(lookup, kept):.2f} M/s, updates {best_rate(update, kept):.2f} M/s")


if __name__ == "__main__":
    main()
