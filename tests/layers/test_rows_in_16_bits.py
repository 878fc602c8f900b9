"""Tables whose rows and slots are stored in bfloat16, in one process."""

import functools
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.tables import store

DIGITS = pathlib.Path(__file__).parents[2] / "examples" / "digits.npz"
HALF = {"rows_dtype": "bfloat16", "slots_dtype": "bfloat16"}


def of_bfloat16(rows):
    return not (np.ascontiguousarray(rows, np.float32).view(np.uint32) & 0xFFFF).any()


@functools.cache
def digits():
    """Ids of pixels and their values, and labels."""
    data = np.load(DIGITS)
    return np.arange(64) * 17 + data["x"].astype("int64"), data["y"]


def trained_on_digits(**types):
    """Loss after 280 small steps, each of which changes a row by less than half of its last bit."""
    keras.utils.set_random_seed(0)
    ids, labels = digits()
    inputs = keras.Input((64,), dtype="int64")
    start = keras.initializers.RandomNormal(stddev=0.05, seed=0)
    rows = psp.layers.DynamicEmbedding(16, combiner="sum", initializer=start, **types)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Activation("relu")(rows)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-4), loss)
    model.fit(ids[:1400], labels[:1400], batch_size=100, epochs=20, verbose=0)
    return model.evaluate(ids, labels, verbose=0)


@pytest.mark.extended
def test_digits_are_learnt_as_with_float32(monkeypatch):
    exact, half = trained_on_digits(), trained_on_digits(**HALF)
    assert abs(half / exact - 1) < 0.02
    # Rounded to nearest, small updates are lost.
    monkeypatch.setattr(store, "at_random", lambda values, *_: values)
    assert trained_on_digits(rows_dtype="bfloat16") / exact > 1.08


@pytest.mark.parametrize(
    "options, rows, computes",
    [
        ({}, "float32", "float32"),
        ({"dtype": "mixed_bfloat16"}, "float32", "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"rows_dtype": "bfloat16"}, "bfloat16", "float32"),
        ({"dtype": "bfloat16", "rows_dtype": "float32"}, "float32", "bfloat16"),
    ],
)
def test_rows_have_the_type_of_variables_unless_it_is_given(options, rows, computes):
    table = psp.layers.DynamicEmbedding(3, **options)
    assert (table.rows_dtype, table.slots_dtype) == (rows, "float32")
    assert table(np.array([1, 2])).dtype == computes
    again = psp.layers.DynamicEmbedding.from_config(table.get_config())
    assert (again.rows_dtype, again.compute_dtype) == (rows, computes)


def test_other_types_are_refused():
    for options in {"rows_dtype": "float16"}, {"slots_dtype": None}:
        (received,) = [f"Received: {name}={value!r}" for name, value in options.items()]
        with pytest.raises(ValueError, match=f'must be "float32" or "bfloat16".*{received}'):
            psp.layers.DynamicEmbedding(3, **options)


def test_a_table_in_16_bits_is_saved_inserted_and_published(tmp_path):
    def model_of():
        inputs = keras.Input((2,), dtype="int64")
        table = psp.layers.DynamicEmbedding(
            3, combiner="sum", default="initializer", name="t", **HALF
        )
        model = keras.Model(inputs, keras.layers.Dense(1)(table(inputs)))
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model, table

    x, y = np.arange(40).reshape(20, 2) * 2**40, np.ones([20, 1])
    model, table = model_of()
    publish = psp.serving.PublishTables(tmp_path / "published")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[publish])
    slots = [np.asarray(v) for v in model.optimizer.variables if v.shape == (0, 3)]
    assert len(slots) == 2 and all(map(of_bfloat16, [table.table.numpy(), *slots]))
    asked = np.concatenate([table.keys, [5, 6]])  # two of them without a row
    rows = table(asked[:, np.newaxis]).numpy()
    assert of_bfloat16(rows)
    reader = psp.serving.TableReader(tmp_path / "published", poll=None)
    np.testing.assert_array_equal(reader.lookup(asked), rows)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for one in model, again:
        one.train_on_batch(x, y)
    # The random bits as well: they are functions of keys and the number of the update.
    for one, other in zip(model.weights, again.weights):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(tf.constant(x)), model(x), atol=1e-6)
    assert exported.values[0].rows.dtype == "bfloat16"
    table.insert([1], np.full([1, 3], 1.004, np.float32))
    np.testing.assert_array_equal(table(np.array([[1]])), [[1.0078125] * 3])
