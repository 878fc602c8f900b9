"""Ways of training with copies of hot rows, for a cluster and for one process.

cache_job.py FOLDER CASES [--reference]

Tables have caches by the names of their layers. `exact...` has to be what one process does, and so
has `stale...`, whose gradients do not depend on what is read. Each worker leaves what its steps
have read.
"""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.hybrid.tables.hot_rows import HotRows
from tests.hybrid.training_job import OneHot, initializer

ROWS, DIM, IDS, BATCH, STEPS, EPOCHS, STALENESS = 300, 4, 6, 32, 20, 2, 15
optimizers, tables = keras.optimizers, psp.tables
CACHES = {"*stale_by_number*": tables.Cache(150, staleness=STALENESS), "*exact*": tables.Cache(150)}


def data():
    """Ids after Zipf's law, and labels; the last batch is not full."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, ROWS + 1)
    size = BATCH * STEPS - 5, IDS
    ids = random.permutation(ROWS)[random.choice(ROWS, size, p=weights / weights.sum())]
    return ids, random.integers(0, 3, len(ids))


def by_number(name):
    """A table of numbered rows; in one process, Keras's would square repeated ids one by one."""
    kind = OneHot if "--reference" in sys.argv else keras.layers.Embedding
    return kind(ROWS, DIM, embeddings_initializer=initializer(7), name=name)


def by_key(name, **options):
    return psp.layers.DynamicEmbedding(DIM, initializer=initializer(7), name=name, **options)


def exact(optimizer):
    """Two tables and two lookups of one of them."""
    options = {"admit": tables.Count(2), "expire": tables.Unused(steps=6) | tables.Norm(0.02)}
    ids = keras.Input((IDS,), dtype="int64")
    first, second = by_number("exact_by_number"), by_key("exact_by_key", **options)
    parts = [first(ids[:, :4]), first(ids[:, 2:]), second(ids)]
    features = keras.layers.Concatenate()([keras.layers.Flatten()(part) for part in parts])
    last = keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(4))
    model = keras.Model(ids, last(features))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model, [first, second]


def stale(optimizer):
    ids = keras.Input((IDS,), dtype="int64")
    cache = tables.Cache(150, staleness=STALENESS)
    layers = [by_number("stale_by_number"), by_key("stale_by_key", cache=cache)]
    model = keras.Model(ids, keras.layers.Concatenate()([layer(ids) for layer in layers]))
    factors = np.linspace(-1, 1, 2 * DIM, dtype="float32")
    model.compile(
        optimizer,
        lambda y, rows: tf.reduce_mean(
            rows * factors * (1 + tf.reshape(tf.cast(y, tf.float32), [-1, 1, 1]))
        ),
    )
    return model, layers


CASES = {
    "exact": lambda: exact(optimizers.SGD(0.5)),
    "exact_clipped": lambda: exact(optimizers.SGD(0.5, global_clipnorm=0.1)),
    "stale": lambda: stale(optimizers.SGD(0.5)),
    "stale_with_slots": lambda: stale(optimizers.Adagrad(0.1)),
}


def train(case):
    """What a case comes to, with bytes of rows in `fit`."""
    x, y = data()
    keras.utils.set_random_seed(1)
    model, layers = CASES[case]()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    before = sent()
    results = dict(model.fit(dataset, epochs=EPOCHS, verbose=0).history)
    results |= {f"bytes {name}": count - before[name] for name, count in sent().items()}
    results["predicted"] = model.predict(x[:21], batch_size=8, verbose=0)
    # Outside of `fit`, nothing waits and no copy is read, by whichever optimizer.
    if case in ("exact", "stale"):
        model.train_on_batch(x[:BATCH], y[:BATCH])
    results |= {f"weight_{i}": w for i, w in enumerate(model.get_weights())}
    results["keys"] = layers[1].keys
    return results


def sent():
    """Bytes of rows so far, by direction."""
    found = {"pull": 0, "gradient": 0}
    for entry in tf.distribute.get_strategy().communication.traffic():
        if entry.direction in found:
            found[entry.direction] += entry.wire_bytes
    return found


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
    strategy = psp.HybridStrategy(placement="parameter_server", cache=CACHES)
    who = "reference" if "--reference" in sys.argv else strategy.task.name
    for name in names:
        reads = []

        def note(hot, now, ids, is_read, reads=reads):
            one = np.full(len(ids), 1)
            reads.append(np.stack([id(hot) * one, now * one, ids, is_read], 1))

        HotRows.on_read = note
        with strategy.scope():
            results = train(name)
        if who != "reference":
            results["reads"] = np.concatenate([np.zeros([0, 4], np.int64), *reads])
        np.savez(folder / f"{name}-{who}.npz", **results)
        print(f"done {name}", flush=True)


if __name__ == "__main__":
    main()
