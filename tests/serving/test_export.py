"""Exported models, loaded by a process that has TensorFlow alone."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp

# Predictions of an exported model, by TensorFlow alone.
LOAD = """
import sys
sys.modules["keras_psplus"] = None  # an import of it fails
import keras, numpy as np, tensorflow as tf
folder, inputs, outputs = sys.argv[1:]
loaded, x = tf.saved_model.load(folder), np.load(inputs)
x = {name: tf.constant(x[name]) for name in x}
found = {"serve": loaded.serve(x), "layer": keras.layers.TFSMLayer(folder)(x)}
for name in "serve", "serving_default":
    found[f"signature {name}"], = loaded.signatures[name](**x).values()
np.savez(outputs, **found)
"""


def predicted_alone(folder, tmp_path, **inputs):
    """What a process without this library computes with an exported model."""
    np.savez(tmp_path / "inputs.npz", **inputs)
    args = [folder, tmp_path / "inputs.npz", tmp_path / "outputs.npz"]
    subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, args)], cwd=tmp_path, check=True, timeout=200
    )
    return dict(np.load(tmp_path / "outputs.npz"))


def of_words(known, words):
    """A model of ids and words, some of which have numbers of their own."""
    ids = keras.Input((3,), dtype="int64", name="a")
    texts = keras.Input((), dtype="string", name="b")
    place = keras.layers.StringLookup(vocabulary=words[:4].tolist())(texts)
    expire = psp.tables.Unused(steps=3)
    parts = [
        psp.layers.DynamicEmbedding(4, combiner="mean", expire=expire, name="ids")(ids),
        psp.layers.DynamicEmbedding(2, default="initializer", name="texts")(texts),
        keras.layers.Embedding(5, 2)(place),
    ]
    dense = keras.layers.Dropout(0.5)(keras.layers.Concatenate()(parts))
    return keras.Model({"a": ids, "b": texts}, keras.layers.Dense(2)(dense)), known, words


def of_histories(known, words):
    """A deep interest network: attention of a candidate to a padded history."""
    history = keras.Input((3,), dtype="int64", name="a")
    candidate = keras.Input((1,), dtype="int64", name="b")
    table = psp.layers.DynamicEmbedding(4, mask_value=0, rows_dtype="bfloat16", name="ids")
    read, asked = table(history), table(candidate)
    wanted = keras.layers.Attention(use_scale=True)([asked, read])
    parts = [*map(keras.layers.Flatten(), (asked, wanted)), keras.layers.LSTM(3)(read)]
    hidden = keras.layers.Dense(6)(keras.layers.Concatenate()(parts))
    hidden = keras.layers.Activation("sigmoid")(keras.layers.BatchNormalization()(hidden))
    model = keras.Model({"a": history, "b": candidate}, keras.layers.Dense(2)(hidden))
    return model, np.where(np.arange(40) % 4, known, 0), known[:30, np.newaxis]


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("make", [of_words, of_histories])
def test_predictions_need_tensorflow_alone(make, tmp_path):
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    known, other = random.integers(-(2**62), 2**62, (2, 40))
    model, known, words = make(known, np.array([f"word {i}" for i in range(30)]))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    x = {"a": known[random.integers(0, 40, (64, 3))], "b": words[random.integers(0, 20, 64)]}
    batches = tf.data.Dataset.from_tensor_slices((x, np.ones([64, 2]))).batch(8)
    model.fit(batches, verbose=0)
    psp.serving.export(model, tmp_path / "served" / "1")
    some = {"a": np.stack([known[:30], known[10:40], other[:30]], 1), "b": words}
    expected = model.predict({n: tf.constant(v) for n, v in some.items()}, verbose=0)
    found = predicted_alone(tmp_path / "served" / "1", tmp_path, **some)
    for way in ("serve", "layer", "signature serve", "signature serving_default"):
        np.testing.assert_allclose(found[way], expected, atol=1e-6)
    # The model trains on with its own tables.
    table = next(layer for layer in model.layers if hasattr(layer, "counts"))
    before = table.counts()[0].sum()
    model.fit(batches, verbose=0)
    assert table.counts()[0].sum() > before


@pytest.mark.processes
def test_a_table_that_stays_outside_is_given_by_rows(tmp_path):
    random = np.random.default_rng(0)
    inputs = keras.Input((3,), dtype="int64", name="a"), keras.Input((), dtype="string", name="b")
    ids, texts = inputs
    table = psp.layers.DynamicEmbedding(4, combiner="mean", name="ids")
    words = psp.layers.DynamicEmbedding(3, default="initializer", name="texts")
    # Each of several lookups has its keys.
    parts = [table(ids), table(ids + 1), words(texts)]
    parts.append(psp.layers.DynamicEmbedding(2, combiner="sum", name="inside")(ids))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
    model.compile("adam", "mse")
    known = random.integers(-(2**62), 2**62, (30, 3))
    x = tf.constant(known), tf.constant([f"word {i}" for i in range(30)])
    publish = psp.serving.PublishTables(tmp_path / "published")
    model.fit(x, np.ones([30, 1]), verbose=0, callbacks=[publish])
    names = ["ids/table", "texts/table"]
    psp.serving.export(model, tmp_path / "served", outside=names)
    loaded = tf.saved_model.load(tmp_path / "served")
    some = tf.concat([x[0][:4], x[0][:4] + 1], 0), tf.concat([x[1][:4], ["new"] * 4], 0)
    needed, given = loaded.keys(some), []
    reader = psp.serving.TableReader(tmp_path / "published", poll=None)
    for name in names:
        # Where more is given, and in another order.
        keys = np.concatenate([reader._latest.tables[name].every[0].keys, needed[name]])
        given += [keys, reader.lookup(keys, name)]
    expected = model.predict(some, verbose=0)
    np.testing.assert_allclose(loaded.serve(some, *given), expected, atol=1e-6)
    names = "a", "b", "ids_table_keys", "ids_table_rows", "texts_table_keys", "texts_table_rows"
    served = loaded.signatures["serving_default"](
        **dict(zip(names, map(tf.constant, (*some, *given))))
    )
    np.testing.assert_allclose(*served.values(), expected, atol=1e-6)
    # Rows that are not given are those of keys that have none.
    others = some[0] + 2**61, tf.strings.join(["no ", some[1]])
    found = loaded.serve(others, *(value[:0] for value in given))
    np.testing.assert_allclose(found, model.predict(others, verbose=0), atol=1e-6)
    for outside in ("ids/table", ["other"]):
        with pytest.raises(
            ValueError, match="lists dynamic tables of the model.*Received: outside"
        ):
            psp.serving.export(model, tmp_path / "other", outside=outside)


def test_rows_in_int8_are_near_and_small(tmp_path):
    random, dim = np.random.default_rng(0), 64
    ids = keras.Input((), dtype="int64", name="a")
    table = psp.layers.DynamicEmbedding(dim, default="initializer", name="ids")
    model = keras.Model({"a": ids}, table(ids))
    keys = random.integers(-(2**62), 2**62, 3000)
    # Of all sizes; one of zeros, and one below what TensorFlow takes for zero.
    rows = random.normal(size=[len(keys), dim]) * 10.0 ** random.integers(-30, 30, [len(keys), 1])
    rows[0], rows[1] = 0, 1e-42
    table.insert(keys, rows)
    some = np.append(keys, 2**62 + 1)
    expected = model.predict({"a": tf.constant(some)}, verbose=0)
    found, sizes = {}, {}
    for quantize in None, "int8":
        folder = tmp_path / f"{quantize}"
        psp.serving.export(model, folder, quantize=quantize)
        sizes[quantize] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        loaded = tf.saved_model.load(folder)
        found[quantize] = loaded.serve({"a": tf.constant(some)}).numpy()
    np.testing.assert_array_equal(found[None], expected)
    alone = predicted_alone(folder, tmp_path, a=some)["serve"]
    np.testing.assert_array_equal(found["int8"], alone)
    error = np.abs(found["int8"] - expected)
    largest = np.abs(expected).max(1, keepdims=True)
    assert (error <= largest / 253.9 + np.finfo(np.float32).tiny).all() and error.max() > 0
    assert not error[0].any() and not error[-1].any()
    assert sizes["int8"] < 0.4 * sizes[None]
    for options in {"quantize": "int4"}, {"quantize": "int8", "outside": ["ids/table"]}:
        with pytest.raises(ValueError, match="`quantize` must be.*Received: quantize='int"):
            psp.serving.export(model, tmp_path / "other", **options)


def test_ragged_ids_and_models_of_other_kinds(tmp_path):
    ids = keras.Input((None,), dtype="int64", ragged=True)
    model = keras.Model(ids, psp.layers.DynamicEmbedding(2, combiner="sum")(ids))
    model.compile("sgd", "mse")
    x = tf.ragged.constant([[1, 2**40], [], [7]], tf.int64)
    model.train_on_batch(x, np.ones([3, 2]))
    with pytest.raises(ValueError, match="Received: format='onnx' with model"):
        model.export(tmp_path / "ragged", "onnx")
    model.export(tmp_path / "ragged", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "ragged")
    np.testing.assert_allclose(loaded.serve(x), model(x), atol=1e-6)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = psp.layers.DynamicEmbedding(2)

        def call(self, ids, training=False):
            return self.table(ids, training=training)

    model = Model()
    with pytest.raises(ValueError, match="Received: a model that is not built"):
        psp.serving.export(model, tmp_path / "own")
    model(np.array([1]))
    with pytest.raises(ValueError, match="neither functional nor sequential.*Received: Model with"):
        psp.serving.export(model, tmp_path / "own")
    model.export(tmp_path / "own", input_signature=[keras.InputSpec("int64", [None])])
    loaded = tf.saved_model.load(tmp_path / "own")
    assert not loaded.serve(tf.constant([1], tf.int64)).numpy().any()
