"""Batches of which each worker maps its own rows equal those that are put together whole."""

import collections
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from keras_psplus import datasets
from keras_psplus.core.batch import batches
from keras_psplus.datasets import take_apart
from keras_psplus.keras_internals.keras_parts import tf_dataset_adapter


def parts(dataset, world, pads):
    """What `split` takes of whole batches, as a dataset."""
    spec = dataset.element_spec

    def cut(*batch):
        return batches.split(batch if type(spec) is tuple else batch[0], world, pads)

    return dataset.map(cut)


def parts_of_own_rows(dataset, world, pads, is_trusted=False):
    pipeline = take_apart(dataset, is_trusted)
    assert not isinstance(pipeline, str), pipeline
    own = batches.OwnRows(world, pipeline.batch_size, pipeline.is_even)
    rows = pipeline.of_rows(pipeline.elements, own.start, own.most)
    return rows.map(lambda rows, batch: own.split(rows, batch, pads)), own.most


def worlds(workers, local):
    return [batches.World(i * local, local, workers * local) for i in range(workers)]


def assert_same(make, world, pads=True, most=100, **options):
    """Two datasets of one kind, so that shuffles begin alike."""
    whole = parts(make(), world, pads).take(most)
    own, _ = parts_of_own_rows(make(), world, pads, **options)
    assert own.element_spec == whole.element_spec
    expected = [tf.nest.flatten(element) for element in whole]
    found = [tf.nest.flatten(element) for element in own.take(most)]
    assert len(found) == len(expected)
    for leaves, other in zip(found, expected, strict=True):
        for leaf, of_whole in zip(leaves, other, strict=True):
            np.testing.assert_array_equal(leaf, of_whole)


def rows(count):
    x = np.arange(3 * count, dtype="float32").reshape(count, 3)
    return tf.data.Dataset.from_tensor_slices({"x": x, "y": np.arange(count)})


def doubled(element):
    return element["x"] * 2.0, element["y"]


CHOOSING = {
    "": lambda data: data,
    "take": lambda data: data.take(11),
    "skip": lambda data: data.skip(2),
    "shard": lambda data: data.shard(2, 1),
    "repeat": lambda data: data.repeat(2),
    "for ever": lambda data: data.repeat(),
    "prefetch": lambda data: data.prefetch(2),
}


@settings(max_examples=10, deadline=None)
# TensorFlow fuses a shuffle with a repeat that follows at once.
@example(2, 1, False, batches.World(0, 1, 2), False, "", "repeat", "repeat", False)
@given(
    st.integers(1, 30),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([world for n in (2, 3, 4) for local in (1, 2) for world in worlds(n, local)]),
    st.booleans(),
    *[st.sampled_from(sorted(CHOOSING))] * 3,
    st.booleans(),
)
def test_batches_are_those_of_whole_ones(
    count, size, drops, world, pads, before, between, behind, is_unknown
):
    # Also whole, it has no fixed order: the parallel map reads ahead of `take`, and begins another
    # shuffle by that.
    repeats = {"repeat", "for ever"}
    assume(between != "take" or not {before, behind} <= repeats)

    def make():
        data = CHOOSING[before](rows(count).shuffle(7, seed=1)).map(doubled)
        if is_unknown:
            data = data.filter(lambda x, y: y % 3 < 2)
        data = data.map(lambda x, y: (x + 1.0, y), num_parallel_calls=2)
        calls = 2 if is_unknown else None
        data = CHOOSING[between](data).batch(size, drops, num_parallel_calls=calls)
        return CHOOSING[behind](data)

    assert_same(make, world, pads, most=12)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_own_rows_hold_those_of_each_replica(size, workers, local, is_even):
    for world in worlds(workers, local):
        own = batches.OwnRows(world, size, is_even)
        first, end = world.span(size)
        assert end - first <= own.most <= end - first + 1
        for some in [size] if is_even else range(1, size + 1):
            start = own.start(some)
            assert 0 <= start and min(start + own.most, some) - start <= own.most
            for replica in range(local):
                first, end = world.padded_bounds(some, replica)
                assert start <= first < end <= min(start + own.most, some)
            assert int(own.start(tf.constant(some))) == start


class Mapped:
    """Counts the elements that a map, which declares that it keeps nothing, is run for."""

    def __init__(self):
        self.seen = []

    def __call__(self, x, y):
        def note(y):
            self.seen.append(int(y))
            return y

        return x, tf.ensure_shape(tf.numpy_function(note, [y], tf.int64, stateful=False), [])


def test_only_own_rows_are_mapped():
    seen = []
    for world in worlds(4, 1):
        mapped = Mapped()
        data = rows(70).map(doubled).map(mapped, num_parallel_calls=3).batch(8)
        own, _ = parts_of_own_rows(data, world, pads=True)
        list(own)
        seen.append(mapped.seen)
    assert [len(ids) for ids in seen] == [18] * 4
    assert sorted(seen[1][:-2])[:4] == [2, 3, 10, 11]
    assert set().union(*seen) == set(range(70))


def test_uneven_rows_are_mapped_with_one_more_at_most():
    # 7 rows are more for the third of five workers than 8 are.
    own = batches.OwnRows(batches.World(2, 1, 5), 8, False)
    assert own.most == 2
    assert batches.OwnRows(batches.World(2, 1, 5), 8, True).most == 1


def test_elements_may_be_of_any_size_sparse_and_ragged():
    def make():
        spec = tf.TensorSpec([None], tf.int64)
        data = tf.data.Dataset.from_generator(
            lambda: (range(i) for i in range(13)), output_signature=spec
        )
        data = data.map(lambda x: (x, tf.sparse.from_dense(x), tf.RaggedTensor.from_tensor([x])))
        stateful = data.map(lambda x, s, r: (x, tf.numpy_function(len, [x], tf.int64), s, r))
        return stateful.map(
            lambda x, n, s, r: (
                tf.reduce_sum(x) + tf.ensure_shape(n, []),
                tf.sparse.reduce_sum(s),
                tf.reduce_sum(r),
            )
        ).batch(4)

    summary = take_apart(make(), is_trusted=False).summary
    assert summary.startswith("each worker maps only its own rows (1 map before the batch; 2 more")
    for world in worlds(2, 1):
        assert_same(make, world)


@pytest.mark.extended
def test_named_tuples_tables_and_captured_values_are_handed_on():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(20), tf.range(20) * 10), -1
    )
    Pair = collections.namedtuple("Pair", "x y")
    shift = tf.constant(5)

    def make():
        data = tf.data.Dataset.from_tensor_slices(Pair(tf.range(10), tf.range(10)))
        return data.map(lambda pair: Pair(table.lookup(pair.x), pair.y + shift)).batch(4)

    for world in worlds(3, 1):
        assert_same(make, world)


def test_class_weights_of_keras_are_put_on_again():
    def make(drops=True):
        data = rows(23).map(doubled).batch(6, drop_remainder=drops)
        adapter = tf_dataset_adapter.TFDatasetAdapter
        return adapter(data, class_weight={1: 2.0, 22: 0.5}).get_tf_dataset()

    assert_same(make, batches.World(2, 2, 4))
    assert_same(lambda: make(drops=False), batches.World(0, 2, 4))


def test_a_shuffle_goes_on_where_it_was():
    data = rows(20).shuffle(20, seed=1).map(doubled).batch(5)
    other = rows(20).shuffle(20, seed=1).map(doubled).batch(5)
    world = batches.World(1, 1, 2)
    for _ in range(3):
        own, _ = parts_of_own_rows(data, world, True)
        for a, b in zip(own, parts(other, world, True), strict=True):
            np.testing.assert_array_equal(a.replicas[0].data[1], b.replicas[0].data[1])


def test_options_are_kept():
    options = tf.data.Options()
    options.threading.private_threadpool_size = 3
    data = rows(20).map(doubled).with_options(options).batch(5)
    own, _ = parts_of_own_rows(data, batches.World(0, 1, 2), True)
    assert own.options().threading.private_threadpool_size == 3


def count_up():
    counter = tf.Variable(0, dtype=tf.int64)
    return lambda x, y: (x, y + counter.assign_add(1))


def seeded(operation):
    def draw(x, y):
        return x + operation([3]), y

    return draw


def branching(x, y):
    return tf.cond(y > 3, lambda: tf.random.normal([3], seed=4), lambda: x), y


def python(x, y):
    return x, tf.ensure_shape(tf.py_function(lambda y: y, [y], tf.int64), [])


PARALLEL = {"num_parallel_calls": 2, "deterministic": False}
ALWAYS = {
    "a map draws random numbers from a seed (RandomUniform)": lambda data: data.map(
        seeded(lambda shape: tf.random.uniform(shape, seed=3))
    ),
    "a map draws random numbers from a seed (RandomStandardNormal)": lambda data: data.map(
        branching
    ),
    "a map changes a state (AssignAddVariableOp)": lambda data: data.map(count_up()),
    "shuffle() is between maps and batch": lambda data: data.shuffle(9, seed=1),
    "cache() is between maps and batch": lambda data: data.cache(),
    "filter() is between maps and batch": lambda data: data.filter(lambda x, y: y > 2),
    "flat_map() is between maps and batch": lambda data: data.flat_map(
        lambda x, y: tf.data.Dataset.from_tensors((x, y)).repeat(2)
    ),
    "unbatch() is between maps and batch": lambda data: data.batch(3).unbatch(),
    "map() hands on what is ready first": lambda data: data.map(lambda x, y: (x, y), **PARALLEL),
}
UNTRUSTED = {
    "a map runs Python code (EagerPyFunc), and AutoShardPolicy.DATA does not say that it keeps "
    "none": lambda data: data.map(python),
}
BEHIND = {
    "zip() is between maps and batch": lambda data: tf.data.Dataset.zip(
        data.map(lambda e: e["x"]), data.map(lambda e: e["y"])
    ).batch(4),
    "it has no map() before the batch": lambda data: data.batch(4),
    "it has no batch() at its end": lambda data: data,
    "map() may need all rows of a batch": lambda data: (
        data.map(doubled).batch(4).map(lambda x, y: (x - tf.reduce_mean(x, 0), y))
    ),
    "cache() may need all rows of a batch": lambda data: data.map(doubled).batch(4).cache(),
    "shuffle() may need all rows of a batch": lambda data: data.map(doubled).batch(4).shuffle(2),
    "padded_batch() may need all rows of a batch": lambda data: data.map(doubled).padded_batch(4),
    "its batches are in no fixed order": lambda data: data.map(doubled).batch(4, **PARALLEL),
    "its batches are not dense": lambda data: data.map(
        lambda element: tf.sparse.from_dense(element["x"])
    ).batch(4),
}


@pytest.mark.parametrize(
    "reason, is_trusted",
    [*((reason, True) for reason in ALWAYS), *((*UNTRUSTED, flag) for flag in (False, True))],
)
def test_what_must_see_all_rows_sees_them(reason, is_trusted):
    stage = {**ALWAYS, **UNTRUSTED}[reason]
    below = take_apart(stage(rows(20).map(doubled)).batch(4), is_trusted)
    above = stage(rows(20).map(doubled)).map(lambda x, y: (x + 1.0, y)).batch(4)
    if is_trusted and reason in UNTRUSTED:
        assert below.summary.startswith("each worker maps only its own rows (2 maps")
        return
    assert below == reason
    # What is behind it is still mapped by its rows.
    assert f"{reason})" in take_apart(above, is_trusted).summary
    if "hands on" not in reason and "draws" not in reason and "state" not in reason:
        for world in worlds(2, 1):
            assert_same(
                lambda: stage(rows(20).map(doubled)).map(lambda x, y: (x + 1.0, y)).batch(4), world
            )


@pytest.mark.parametrize("reason", BEHIND)
def test_batches_that_cannot_be_made_of_own_rows_stay(reason):
    found = take_apart(BEHIND[reason](rows(20)), is_trusted=True)
    assert found == reason


def test_random_numbers_without_seeds_or_of_the_element_may_be_drawn():
    tf.random.set_seed(None)
    unseeded = rows(20).map(doubled).map(seeded(tf.random.uniform)).batch(4)
    assert take_apart(unseeded, False).summary.endswith("(2 maps before the batch)")

    def make():
        def draw(x, y):
            return x + tf.random.stateless_normal([3], tf.stack([y, 1])), y

        return rows(20).map(doubled).map(draw).batch(4)

    for world in worlds(2, 1):
        assert_same(make, world)


def test_a_global_seed_seeds_maps():
    with contextlib.ExitStack() as stack:
        stack.callback(tf.random.set_seed, None)
        tf.random.set_seed(5)
        data = rows(20).map(doubled).map(seeded(tf.random.uniform)).batch(4)
        assert "random numbers from a seed" in take_apart(data, False)


def test_layers_of_keras_that_draw_are_found():
    flip = keras.layers.RandomFlip(seed=1)
    images = tf.data.Dataset.from_tensor_slices(tf.ones([6, 4, 4, 1]))
    assert "a map changes a state" in take_apart(images.map(flip).batch(2), is_trusted=True)


def test_names_of_stages_are_those_of_a_script():
    assert datasets._name(rows(2).padded_batch(2)) == "padded_batch()"
