"""Speed, by seconds of the processor, and memory of a dynamic table in one process.

python benchmarks/dynamic_rows.py [--keys MILLIONS] [--dim DIM] [--batch KEYS] [--optimizer adam]
    [--rows_dtype bfloat16] [--slots_dtype bfloat16]

Memory is kept as servers keep it.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.cluster.process import tuning
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables.row_optimizer import config_of
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
    return int(tf.size(batches[0])) / min(times) / 1e6


def main() -> None:
    """Prints rates, pauses and bytes a key."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=float, default=2.0, help="millions of keys")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch", type=int, default=BATCH, help="keys of a lookup or an update")
    parser.add_argument("--optimizer", default="sgd", help="Keras's name of it")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--rows_dtype", default="float32", choices=dtypes)
    parser.add_argument("--slots_dtype", default="float32", choices=dtypes)
    flags = parser.parse_args()
    tuning.tune()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    initializer = initial_rows.check_initializer("uniform")
    spec = {"name": "t", "dim": flags.dim, "initializer": initializer, "default": "zeros"}
    types = {"rows_dtype": flags.rows_dtype, "slots_dtype": flags.slots_dtype}
    store = RowStore({**spec, **types, "admit": None, "expire": []})
    optimizer = keras.optimizers.get(flags.optimizer)
    store.set_optimizer(config_of(optimizer, None, None, None))
    assert store.optimizer is not None
    scalars = tf.ones([store.optimizer.scalars]) / 2
    stored = sum(column.stored.size * flags.dim for column in store.columns)

    any_keys = tf.TensorSpec([None], tf.int64)

    @tf.function(input_signature=[any_keys, tf.TensorSpec([None, flags.dim])], autograph=False)
    def apply(keys: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(
            [store.apply(keys, gradient, tf.constant(0.1), scalars, tf.constant(0, tf.int64))]
        ):
            return tf.identity(keys[0])

    @tf.function(input_signature=[any_keys], autograph=False)
    def lookup(keys: tf.Tensor) -> tf.Tensor:
        unique, positions = tf.unique(keys)
        return tf.gather(store.lookup(unique, True), positions)

    gradients = {size: tf.ones([size, flags.dim]) for size in (BATCH, flags.batch)}

    def update(keys: tf.Tensor) -> None:
        apply(keys, gradients[len(keys)])

    random, count = np.random.default_rng(0), int(flags.keys * 1e6) // BATCH
    update(tf.range(BATCH, dtype=tf.int64))
    before, pauses, waits, kept = resident(), [], [], []
    for i in range(count):
        keys = tf.constant(random.integers(-(2**62), 2**62, BATCH))
        begun, since = time.process_time(), time.perf_counter()
        update(keys)
        pauses.append(time.process_time() - begun)
        waits.append(time.perf_counter() - since)
        if i >= count - TRIES:
            kept.append(keys[: flags.batch])
    taken = (resident() - before) / (count * BATCH)
    print(f"{count * BATCH / 1e6:.1f} M keys of dim {flags.dim}, in batches of {BATCH}")
    print(f"inserts and updates {BATCH / np.median(pauses) / 1e6:.2f} M/s")
    for what, times in (("by the processor", pauses), ("by the clock", waits)):
        longest, usual = 1e3 * max(times), 1e3 * np.median(times)
        print(f"longest batch {longest:.0f} ms, median {usual:.0f} ms {what}")
    print(f"bytes a key: {taken:.0f}, of its row and slots {stored}")
    lookup(kept[0])
    rates = best_rate(lookup, kept), best_rate(update, kept)
    print("of {} keys: lookups {:.2f} M/s, updates {:.2f} M/s".format(flags.batch, *rates))


if __name__ == "__main__":
    main()
