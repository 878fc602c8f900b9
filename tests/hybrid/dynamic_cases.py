"""Ways of training with a dynamic table, for clusters and for one process."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from tests.hybrid.models import compiled, flat, head, initializer, is_alone

# The layout that others are held against: plain Keras has no such tables.
ALONE = "hybrid1"
KEYS, DIM, BATCH, STEPS = 60, 4, 16, 6
optimizers, tables = keras.optimizers, psp.tables


# By name: the layer's options, the optimizer, and whether ids are strings.
CASES = {
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
    "bounded": (
        {
            "default": "initializer",
            "embeddings_regularizer": keras.regularizers.L1L2(0.01, 0.1),
            "embeddings_constraint": keras.constraints.MaxNorm(0.07, axis=1),
        },
        lambda: optimizers.Adam(0.1),
        False,
    ),
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


def train(case, x, y, epochs=2, predicts=True, **others):
    """What a case comes to."""
    options, optimizer, is_text = CASES[case]
    keras.utils.set_random_seed(1)
    ids = keras.Input((5,), dtype="string" if is_text else "int64")
    table = psp.layers.DynamicEmbedding(DIM, initializer=initializer(7), name="t", **options)
    model = compiled(keras.Model(ids, head(flat(table(ids)))), optimizer())
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    results = dict(model.fit(dataset, epochs=epochs, verbose=0, **others).history)
    if predicts:
        results["predicted"] = model.predict(dataset.unbatch().take(21).batch(8), verbose=0)
    return model, table, results


def train_alone(name, **others):
    """What a case comes to without evaluation and predictions."""
    x, y = data()
    return train(name, as_ids(name, x), y, predicts=False, **others)


def train_briefly(name):
    model, table, results = train_alone(name)
    return results | contents(model, table)


def train_more(model, case, x, y, **others):
    """Changes rows, by a batch of which the shape is no more known than that of others."""
    dataset = tf.data.Dataset.from_tensor_slices((as_ids(case, x[:BATCH]), y[:BATCH])).batch(BATCH)
    model.fit(dataset, verbose=0, **others)


def contents(model, table):
    """Keys, rows, slots and counts."""
    arrays = {f"table_{name}": value for name, value in table._snapshot().arrays().items()}
    arrays.pop("table_last_seconds")
    arrays["table_candidates"] = arrays["table_candidates"][:, :3]
    slots = [np.asarray(v) for v in model.optimizer.variables]
    return arrays | {f"slot_{i}": slot for i, slot in enumerate(slots)}


class BreakOff(keras.callbacks.Callback):
    """Ends training in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.is_second = epoch == 1

    def on_train_batch_end(self, batch, logs=None):
        if self.is_second and batch == 3:
            raise InterruptedError


def broken_off(name, folder):
    """Breaks training off, which goes on in another model from its backup."""
    for last in [BreakOff()], []:
        with contextlib.suppress(InterruptedError):
            backup = keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=3)
            found = train_alone(name, callbacks=[backup, *last])
    return found


def train_and_evaluate(name, **others):
    """What a case comes to, in which ids are evaluated of which some have no row."""
    x, y = data()
    other = as_ids(name, x[:40] + [0, 0, 0, 0, 1])
    checked = tf.data.Dataset.from_tensor_slices((other, y[:40])).batch(12)
    return train(name, as_ids(name, x), y, validation_data=checked, **others)


def moved(name, model, table):
    """Changes keys by hand: some go, others come, and some get other rows, slots and counts."""
    refused = []

    def on_train_batch_end(batch, logs):
        try:
            table.clear()
        except ValueError as error:
            refused.append(str(error))

    if not is_alone():
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=on_train_batch_end)
        train_more(model, name, *data(), callbacks=[callback])
        # Servers of TensorFlow's wait for steps that are under way.
        served = getattr(tf.distribute.get_strategy(), "mode", None) is not None
        assert served or "between two calls of `fit`" in refused[0], refused
    ids = as_ids(name, data()[0]).ravel()
    known = np.array(sorted(set(ids.tolist())))[:30]
    new = as_ids(name, np.arange(8).reshape(1, -1)).ravel()
    table.clear()
    slots = [of for of in model.optimizer.variables if of.shape == (0, DIM)]
    rows = np.random.default_rng(2).random((30, DIM))
    table.insert(known, rows, [rows + i for i in range(len(slots))], np.arange(30) + 1)
    table.insert(np.concatenate([known[:4], new]), rows[:12] + 7)
    table.remove(np.concatenate([known[9:20], new[:3]]))
    keys, found = map(np.concatenate, zip(*table.items(7)))
    order = np.argsort(keys)
    after = contents(model, table)
    np.testing.assert_array_equal(keys[order], after["table_keys"])
    np.testing.assert_array_equal(found[order], after["table_rows"])
    same = {of: after[f"table_{of}"] for of in ("keys", "rows", "frequency", "candidates")}
    same |= {f"slot_{i}": np.asarray(slot) for i, slot in enumerate(slots)}
    return {f"moved_{what}": value for what, value in same.items()}


def check_reads_weights(name, model, table, folder):
    """Checks that a model reads its file into what has other rows."""
    before = contents(model, table)
    model.save_weights(f"{folder}/all.weights.h5")
    train_more(model, name, *data())
    model.load_weights(f"{folder}/all.weights.h5")
    for what, value in contents(model, table).items():
        np.testing.assert_array_equal(value, before[what], err_msg=what)


# Rows and slots in 16 bits.


def halves(folder=None, name="t", callbacks=()):
    """Trains rows in bfloat16, in a model whose gradients are exact in any order of their sum."""
    x, y = (of[: BATCH * (STEPS - 1)] for of in data())
    ids = keras.Input((5,), dtype="int64")
    table = psp.layers.DynamicEmbedding(
        DIM,
        combiner="sum",
        admit=tables.Count(2),
        initializer=initializer(7),
        rows_dtype="bfloat16",
        slots_dtype="bfloat16",
        name=name,
    )
    half = keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Ones())
    half.trainable = False
    model = keras.Model(ids, half(table(ids)))
    model.compile(optimizers.SGD(0.3, momentum=0.9), lambda y, p: -keras.ops.mean(y * p, -1))
    dataset = tf.data.Dataset.from_tensor_slices((x, y.astype("float32"))).batch(BATCH)
    model.fit(dataset, epochs=2, verbose=0, callbacks=list(callbacks))
    before = contents(model, table)
    if folder is not None:
        # Files of servers, in which rows are as they are stored.
        strategy = tf.distribute.get_strategy()
        strategy.save_tables(folder)
        model.fit(dataset, verbose=0)
        strategy.load_tables(folder)
        after = contents(model, table)
        for what in [what for what in after if after[what].shape[1:] == (DIM,)]:
            np.testing.assert_array_equal(after[what], before[what], err_msg=what)
    return before | {"predicted": model.predict(x[:21], verbose=0)}


def check_halves(found, expected):
    """Checks that rows and slots are numbers of bfloat16, and the same bits."""
    matrices = [what for what in expected if expected[what].shape[1:] == (DIM,)]
    assert len(matrices) == 2 and len(expected["table_keys"]) > KEYS // 2
    for what in matrices:
        assert not (found[what].view(np.uint32) & 0xFFFF).any()
        np.testing.assert_array_equal(found[what], expected[what], err_msg=what)


# Sequences with padding.


def sequences():
    """Keys and padded sequences of the numbers 1 to `KEYS` of keys, and labels."""
    random = np.random.default_rng(1)
    keys = random.integers(-(2**62), 2**62, KEYS + 1)
    x = random.integers(1, KEYS + 1, (BATCH * 3 - 5, 6))
    lengths = random.integers(1, 7, len(x))
    return (
        keys,
        np.where(np.arange(6) < lengths[:, np.newaxis], x, 0),
        random.integers(0, 3, len(x)),
    )


def sequence_model(ids, rows):
    """A model in which all that reads rows has to leave padding out."""
    seed = keras.initializers.GlorotUniform(5)
    lstm = keras.layers.LSTM(3, kernel_initializer=seed, recurrent_initializer=seed)(rows)
    attention = keras.layers.MultiHeadAttention(1, 3, kernel_initializer=seed)(rows, rows)
    pooled = [keras.layers.GlobalAveragePooling1D()(of) for of in (rows, attention)]
    return keras.Model(ids, head(keras.layers.Concatenate()([lstm, *pooled])))


def train_sequences(is_text=False, embedding=None):
    """What sequences come to, with a dynamic table or an embedding of numbered rows."""
    keys, x, y = sequences()
    if embedding is None:
        x = np.where(x, keys[x], 0)
        x = np.array([[f"{key}" if key else "" for key in row] for row in x]) if is_text else x
        embedding = psp.layers.DynamicEmbedding(
            DIM, initializer=initializer(7), mask_value="" if is_text else 0, name="t"
        )
    ids = keras.Input((None,), dtype="string" if is_text else "int64")
    model = compiled(sequence_model(ids, embedding(ids)), optimizers.Adagrad(0.3))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    found = dict(model.fit(dataset, epochs=2, verbose=0).history)
    found["predicted"] = model.predict(dataset.take(1).unbatch().batch(8), verbose=0)
    if isinstance(embedding, psp.layers.DynamicEmbedding):
        found |= contents(model, embedding)
    return found
