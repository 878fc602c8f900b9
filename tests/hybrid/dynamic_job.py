"""Ways of training with a dynamic table, for a cluster and for one process that is the reference.

dynamic_job.py FOLDER CASES [--reference]
"""

import functools
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from tests.hybrid.models import head

KEYS, DIM, BATCH, STEPS = 60, 4, 16, 6
optimizers, tables = keras.optimizers, psp.tables


def adam():
    return optimizers.AdamW(0.05, weight_decay=0.1, global_clipnorm=0.5)


# By name: the layer's options, the optimizer, and whether ids are strings.
CASES = {
    "plain": ({}, adam, False),
    "counted": (
        {"admit": tables.Count(2), "expire": tables.Unused(steps=3), "default": "initializer"},
        lambda: optimizers.Adagrad(0.3),
        True,
    ),
    "filtered": (
        {
            "admit": tables.Bloom(2, bits=8 * 840 * 64),
            "expire": tables.Unused(steps=4) | tables.Norm(0.06),
            "combiner": "mean",
        },
        lambda: optimizers.SGD(0.5, momentum=0.9),
        False,
    ),
    "keras_rs": ({"admit": tables.Count(2), "combiner": "sqrtn"}, adam, False),
}


def data():
    """Ids of which some come for a few steps only, and labels; the last batch is not full."""
    random = np.random.default_rng(0)
    keys = random.integers(-(2**62), 2**62, KEYS)
    rows = BATCH * STEPS - 7
    first = np.arange(rows)[:, np.newaxis] // BATCH * 8
    return keys[(first + random.integers(0, 25, (rows, 5))) % KEYS], random.integers(0, 3, rows)


def as_ids(case, x):
    """The ids of a case: integers, or strings."""
    return np.array([[f"id {key}" for key in row] for row in x]) if CASES[case][2] else x


def of_features(table, ids):
    """Two of KerasRS's features of one table, in a layer that its configuration has made."""
    import keras_rs

    def feature(name, *length):
        return keras_rs.layers.FeatureConfig(name, table, (None, *length), (None, DIM))

    features = {"several": feature("several", 4), "one": feature("one")}
    layer = keras_rs.layers.DistributedEmbedding(features)
    found = layer({"several": ids[:, :4], "one": ids[:, 4]})
    return keras.layers.Concatenate()([found["several"], found["one"]])


class InBranch(keras.layers.Layer):
    """Looks up in a branch, where the table is made as well."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, ids):
        rows = tf.shape(ids)[0]
        found = tf.cond(rows >= 0, lambda: self.table(ids), lambda: tf.zeros([rows, 5, DIM]))
        return tf.ensure_shape(found, [None, 5, DIM])


def train(case, x, y, epochs=2, **others):
    """What a case comes to."""
    options, optimizer, is_text = CASES[case]
    keras.utils.set_random_seed(1)
    ids = keras.Input((5,), dtype="string" if is_text else "int64")
    initializer = keras.initializers.RandomUniform(-0.05, 0.05, seed=7)
    table = psp.layers.DynamicEmbedding(DIM, initializer=initializer, name="t", **options)
    ways = {"keras_rs": of_features, "plain": lambda table, ids: InBranch(table)(ids)}
    embedded = ways.get(case, lambda table, ids: table(ids))(table, ids)
    model = keras.Model(ids, head(keras.layers.Flatten()(embedded)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    results = dict(model.fit(dataset, epochs=epochs, verbose=0, **others).history)
    results["predicted"] = model.predict(dataset.unbatch().take(21).batch(8), verbose=0)
    return model, table, results


def train_more(model, case, x, y):
    """Changes rows, by a batch of which the shape is no more known than that of others."""
    dataset = tf.data.Dataset.from_tensor_slices((as_ids(case, x), y)).batch(BATCH)
    model.fit(dataset, verbose=0)


def contents(model, table):
    """Keys, rows, slots and counts."""
    arrays = {f"table_{name}": value for name, value in table._snapshot().arrays().items()}
    arrays.pop("table_last_seconds")
    arrays["table_candidates"] = arrays["table_candidates"][:, :3]
    slots = [np.asarray(v) for v in model.optimizer.variables]
    return arrays | {f"slot_{i}": slot for i, slot in enumerate(slots)}


def check_files_of_servers(strategy, folder, model, table, x, y):
    """Has the servers write the table, and read it again."""
    before = contents(model, table)
    strategy.save_tables(folder / "tables")
    train_more(model, "counted", x[:BATCH], y[:BATCH])
    strategy.load_tables(folder / "tables")
    after = contents(model, table)
    # Dense weights go on; slot 2 is the table's.
    for what in [name for name in after if name.startswith("table") or name == "slot_2"]:
        np.testing.assert_array_equal(after[what], before[what], err_msg=what)


def run(strategy, folder, names, who, check):
    """Trains cases, leaves what they come to, and calls a function of the case `counted`."""
    x, y = data()
    for name in names:
        with strategy.scope():
            more = {}
            if name == "counted":
                # With ids that have no row.
                other = as_ids(name, x[:40] + [0, 0, 0, 0, 1])
                checked = tf.data.Dataset.from_tensor_slices((other, y[:40])).batch(12)
                more = {"validation_data": checked}
            model, table, results = train(name, as_ids(name, x), y, **more)
            results |= contents(model, table)
            path = folder / f"{name}-{who}.weights.h5"
            model.save_weights(path)
            # Into what has other rows, and from one process into a cluster.
            train_more(model, name, x[:BATCH], y[:BATCH])
            model.load_weights(path)
            again = contents(model, table)
            for what, value in again.items():
                np.testing.assert_array_equal(value, results[what], err_msg=what)
            if name == "counted":
                check(model, table, x, y)
        np.savez(folder / f"{name}-{who}.npz", **results)
        print(f"done {name}: {len(results['table_keys'])} keys", flush=True)


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
    if "--reference" in sys.argv:
        run(psp.HybridStrategy(), folder, names, "reference", lambda *_: None)
        return
    strategy = psp.HybridStrategy()
    check = functools.partial(check_files_of_servers, strategy, folder)
    run(strategy, folder, names, strategy.task.name, check)


if __name__ == "__main__":
    main()
