import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from keras_psplus.datasets import seed_shuffles, serialize


@pytest.fixture(autouse=True)
def no_global_seed():
    # With one, which other tests may have set, no shuffle is unseeded.
    tf.random.set_seed(None)


def order(dataset):
    return [int(x) for x in dataset]


def twice(make, seed=5):
    """The order of two epochs, as two workers would see it."""
    # Kept alive, with the seed generators that they hold, as Keras keeps the user's dataset.
    originals = [make() for _ in range(2)]
    workers = [seed_shuffles(original, seed) for original in originals]
    return [[order(w), order(w)] for w in workers]


def test_unseeded_shuffles_become_alike_and_change_by_epoch():
    a, b = twice(lambda: tf.data.Dataset.range(50).shuffle(20).map(lambda x: x).shuffle(50))
    assert a == b
    assert a[0] != a[1]
    assert sorted(a[0]) == list(range(50))


def test_another_seed_gives_another_order():
    def make():
        return tf.data.Dataset.range(50).shuffle(50)

    assert order(seed_shuffles(make(), 1)) != order(seed_shuffles(make(), 2))


def test_shuffles_inside_functions_are_reached():
    def make():
        return tf.data.Dataset.range(4).flat_map(
            lambda i: tf.data.Dataset.range(10 * i, 10 * i + 10).shuffle(10)
        )

    a, b = twice(make)
    assert a == b
    assert a[0] != sorted(a[0])


def test_seeded_and_unshuffled_datasets_are_left_alone():
    seeded = tf.data.Dataset.range(20).shuffle(20, seed=3)
    expected = order(tf.data.Dataset.range(20).shuffle(20, seed=3))
    assert order(seed_shuffles(seeded, 5)) == expected
    plain = tf.data.Dataset.range(20).batch(3)
    assert seed_shuffles(plain, 5) is plain


def test_samples_of_several_datasets_become_alike():
    def make():
        parts = [tf.data.Dataset.range(i, 60, 3) for i in range(3)]
        return tf.data.Dataset.sample_from_datasets(parts)

    a, b = twice(make)
    assert a[0] == b[0]


def test_python_generators_and_lookup_tables_survive():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(9), tf.range(9) * 10), -1
    )

    def make():
        dataset = tf.data.Dataset.from_generator(
            lambda: iter(range(9)), output_signature=tf.TensorSpec([], tf.int32)
        )
        return dataset.map(table.lookup).shuffle(9)

    a, b = twice(make)
    assert a == b
    assert sorted(a[0]) == [10 * i for i in range(9)]


def test_options_are_kept():
    options = tf.data.Options()
    options.deterministic = False
    dataset = tf.data.Dataset.range(9).shuffle(9).with_options(options)
    assert seed_shuffles(dataset, 1).options().deterministic is False
    np.testing.assert_array_equal(sorted(order(seed_shuffles(dataset, 1))), np.arange(9))


def read(graph, dataset):
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return order(dataset_ops._VariantDataset(variant, dataset.element_spec))


@pytest.mark.parametrize("seed", [None, 3])
def test_serialized_orders_are_alike_and_change_by_epoch(seed):
    dataset = tf.data.Dataset.range(50).shuffle(50, seed=seed).map(lambda x: x + 1)
    epochs = [[read(serialize(dataset, 7, epoch), dataset) for _ in range(2)] for epoch in range(3)]
    for a, b in epochs:
        assert a == b
        assert sorted(a) == list(range(1, 51))
    assert epochs[0][0] != epochs[1][0] != epochs[2][0]
    if seed:
        # As the dataset itself begins.
        assert epochs[0][0] == order(dataset)


def test_an_order_that_is_to_stay_stays():
    dataset = tf.data.Dataset.range(50).shuffle(50, reshuffle_each_iteration=False)
    assert read(serialize(dataset, 7, 0), dataset) == read(serialize(dataset, 7, 1), dataset)


def test_caches_are_serialized_empty():
    dataset = tf.data.Dataset.range(9).cache().shuffle(9)
    order(dataset)
    assert sorted(read(serialize(dataset, 1), dataset)) == list(range(9))


def test_what_needs_this_process_is_not_serialized():
    generator = tf.data.Dataset.from_generator(
        lambda: iter(range(9)), output_signature=tf.TensorSpec([], tf.int32)
    )
    numbers = tf.data.Dataset.range(3)
    variable = tf.Variable(1, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1], [2], tf.int64, tf.int64), -1
    )
    for dataset, what in (
        (generator, "(GeneratorDataset|PyFunc)"),
        (numbers.map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)), "PyFunc"),
        (numbers.map(lambda x: x + variable), "VarHandleOp"),
        (numbers.map(table.lookup), "HashTable"),
    ):
        with pytest.raises(ValueError, match=f"it uses \\w*{what}"):
            serialize(dataset, 1)
