"""Rows that come several times are summed only where an optimizer cannot tell."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.core.batch import duplicate_rows


def slices(dtype="float32"):
    values = tf.constant([[1, 2], [3, 4], [5, 6], [7, 8]], dtype)
    return tf.IndexedSlices(values, tf.constant([4, 0, 4, 2], tf.int64), tf.constant([5, 2]))


def updated(make, gradient):
    variable = keras.Variable(np.ones((5, 2), "float32"))
    optimizer = make()
    for _ in range(2):
        optimizer.apply([gradient], [variable])
    return variable.numpy()


def test_sums_come_in_the_order_of_first_rows():
    found = duplicate_rows.summed(slices())
    np.testing.assert_array_equal(found.indices, [4, 0, 2])
    np.testing.assert_array_equal(found.values, [[6, 8], [3, 4], [7, 8]])
    np.testing.assert_array_equal(found.dense_shape, [5, 2])


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ],
)
def test_those_that_make_no_difference_are_summed(make):
    gradient = duplicate_rows.summed_for(make(), slices())
    assert len(gradient.indices) == 3
    np.testing.assert_allclose(updated(make, gradient), updated(make, slices()), rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.SGD(0.1, clipvalue=4.0),
        lambda: keras.optimizers.SGD(0.1, clipnorm=4.0),
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=4.0),
    ],
)
def test_those_that_would_make_a_difference_are_not(make):
    gradient = slices()
    assert duplicate_rows.summed_for(make(), gradient) is gradient
    summed = updated(make, duplicate_rows.summed(gradient))
    assert not np.allclose(summed, updated(make, gradient), rtol=1e-4)


def test_what_is_not_known_stays_as_it_is():
    class Own(keras.optimizers.SGD):
        pass

    gradient = slices()
    assert duplicate_rows.summed_for(Own(0.1), gradient) is gradient
    assert duplicate_rows.summed_for(object(), gradient) is gradient
    half, whole = slices("float16"), tf.constant([1.0])
    for other in (half, whole, None):
        assert duplicate_rows.summed_for(keras.optimizers.SGD(0.1), other) is other


@pytest.mark.parametrize("eager", [False, True])
def test_distinct_ids_are_known_by_how_they_were_made(eager):
    found = {}

    def look(indices):
        unique, positions = tf.unique(indices)
        for name, ids in {
            "unique": unique,
            "same": tf.identity(tf.identity(unique)),
            "some": tf.identity(unique)[: tf.size(positions) - 1],
            "positions": positions,
            "two": tf.concat([unique, unique], 0),
            "any": indices,
        }.items():
            of = duplicate_rows.looked_up(ids)
            found[name] = of if of is None else of is indices

    if eager:
        look(tf.constant([3, 3, 1]))
        assert set(found.values()) == {None}
        return
    tf.function(look).get_concrete_function(tf.TensorSpec([3], tf.int64))
    distinct = {name: True for name in ("unique", "same", "some")}
    assert found == {**distinct, "positions": None, "two": None, "any": None}


@tf.function
def tables(x, table):
    """Gradients of two parts of a batch, and of one, by rows of ids of several origins."""
    x = tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, None])
    places = tf.range(tf.shape(x)[1])
    distances = tf.constant([[0, 1, 2], [1, 0, 1]])
    between = tf.abs(places[:, tf.newaxis] - places)
    lookups = {
        "places": lambda x: tf.reduce_sum(x[..., tf.newaxis] * tf.gather(table, places)),
        "distances": lambda x: tf.einsum("bi,jid->", x, tf.gather(table, distances)),
        "between": lambda x: tf.einsum("bi,jid->", x, tf.gather(table, between)),
        "zeros": lambda x: tf.reduce_sum(tf.gather(table, 0 * tf.cast(x, tf.int32))),
        "ones of rows": lambda x: tf.reduce_sum(tf.gather(table, tf.fill(tf.shape(x)[:1], 1))),
        "rows": lambda x: tf.reduce_sum(tf.gather(table, tf.cast(x, tf.int32))),
    }
    found = {}
    for name, lookup in lookups.items():
        with tf.GradientTape(persistent=True) as tape:
            parts = [lookup(x[:2]), lookup(x[2:]), lookup(x)]
        found[name] = [tape.gradient(part, table) for part in parts]
    return {
        name: (joined_twice(first, second), whole) for name, (first, second, whole) in found.items()
    }


def joined_twice(first, second):
    """With a third part, of zeros."""
    zeros = tf.IndexedSlices(0.0 * second.values, second.indices, second.dense_shape)
    return duplicate_rows.joined(duplicate_rows.joined(first, second), zeros)


def test_ids_that_are_of_no_row_are_looked_up_once():
    table = tf.Variable(np.arange(8.0).reshape(4, 2), dtype="float32")
    x = tf.constant([[0.0, 1, 2], [2, 2, 1], [3, 0, 0]])
    for name, (joined, whole) in tables(x, table).items():
        for function in (lambda values: values, tf.square):
            sums = [
                tf.math.unsorted_segment_sum(function(one.values), one.indices, 4)
                for one in (joined, whole)
            ]
            np.testing.assert_allclose(*sums, rtol=1e-6, err_msg=name)


def test_equal_places_with_other_ids_are_not_added_up():
    @tf.function
    def both():
        first, second = (
            tf.IndexedSlices(tf.ones([2, 1]), tf.constant(ids), tf.constant([3, 1]))
            for ids in ([0, 1], [0, 2])
        )
        return duplicate_rows.joined(first, second)

    found = both()
    np.testing.assert_array_equal(found.values[:, 0], [1, 1, 1, 1])
    np.testing.assert_array_equal(found.indices, [0, 1, 0, 2])


@pytest.mark.parametrize(
    "counts, keeps_size, expected",
    [
        ([2, 0, 2], True, [2, 2, 0, 0]),
        ([2, 0, 2], False, [2, 2]),
        ([1, 3], True, [1, 1, 1, 1]),
        ([1, 3], False, [1, 1, 1, 1]),
    ],
)
def test_places_are_those_of_parts_of_equal_length(counts, keeps_size, expected):
    """Of ids that are all the same, the ids do not show it."""

    @tf.function
    def whole():
        ids = tf.zeros([4], tf.int32)
        slices = tf.IndexedSlices(tf.ones([4, 1]), ids, tf.constant([3, 1]))
        join = duplicate_rows.whole_of(slices, keeps_size)
        return join(slices, tf.constant(counts))

    np.testing.assert_array_equal(whole().values[:, 0], expected)


def test_rows_that_are_distinct_are_not_summed_again():
    def gradient(ids):
        unique, _ = tf.unique(ids)
        slices = tf.IndexedSlices(tf.ones([tf.size(unique), 2]), tf.identity(unique))
        assert duplicate_rows.summed(slices) is slices
        assert duplicate_rows.summed(tf.IndexedSlices(slices.values, ids)) is not slices
        return unique

    tf.function(gradient).get_concrete_function(tf.TensorSpec([None], tf.int64))
