import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.core.batch import batches


def worlds(replicas, local):
    return [batches.World(first, local, replicas) for first in range(0, replicas, local)]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 200))
def test_every_row_goes_to_one_replica_in_order(workers, local, rows):
    bounds = [
        world.bounds(rows, replica)
        for world in worlds(workers * local, local)
        for replica in range(local)
    ]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == rows
    assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
    sizes = [end - first for first, end in bounds]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 40))
def test_as_many_rows_of_a_smaller_batch_are_enough(workers, local, batch_size):
    for world in worlds(workers * local, local):
        own = batches.OwnRows(world, batch_size, is_even=False)
        for rows in range(1, batch_size + 1):
            first, end = world.span(rows)
            start = own.start(rows)
            assert 0 <= start <= first and end <= start + own.most


def test_split_cuts_all_leaves_alike():
    data = {
        "dense": tf.reshape(tf.range(14), [7, 2]),
        "ragged": tf.ragged.constant([[i] * (i % 3) for i in range(7)]),
        "sparse": tf.sparse.from_dense(tf.eye(7)),
        "scalar": tf.constant(3),
    }
    parts = [part for world in worlds(3, 1) for part in batches.split(data, world).replicas]
    assert [int(p.local_rows) for p in parts] == [3, 2, 2]
    assert [int(p.global_rows) for p in parts] == [7, 7, 7]
    np.testing.assert_array_equal(tf.concat([p.data["dense"] for p in parts], 0), data["dense"])
    assert tf.concat([p.data["ragged"] for p in parts], 0).to_list() == data["ragged"].to_list()
    dense = [tf.sparse.to_dense(p.data["sparse"]) for p in parts]
    np.testing.assert_array_equal(tf.concat(dense, 0), tf.eye(7))
    assert all(int(p.data["scalar"]) == 3 for p in parts)


def rows_in(part):
    return [int(row) for row in part.data["dense"]], int(part.local_rows), int(part.global_rows)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_replica_without_rows_gets_one_that_does_not_count(is_known):
    def parts(rows, **options):
        data = {"dense": tf.range(rows), "text": tf.fill([rows], "a")}
        dataset = tf.data.Dataset.from_tensors(data)
        if rows and not is_known:
            dataset = tf.data.Dataset.from_tensor_slices(data).batch(5)
        found = []
        for world in worlds(4, 2):
            split = functools.partial(batches.split, world=world, **options)
            found += next(iter(dataset.map(split))).replicas
        assert [len(part.data["text"]) for part in found] == [len(p.data["dense"]) for p in found]
        return list(map(rows_in, found))

    assert parts(2) == [([0], 1, 2), ([1], 0, 2), ([1], 1, 2), ([1], 0, 2)]
    assert parts(2, pads=False) == [([0], 1, 2), ([], 0, 2), ([1], 1, 2), ([], 0, 2)]
    assert parts(5) == [([0, 1], 2, 5), ([2], 1, 5), ([3], 1, 5), ([4], 1, 5)]
    assert parts(0) == [([0], 0, 0)] * 4


def test_even_batches_keep_their_static_shape():
    dataset = tf.data.Dataset.from_tensors(tf.zeros([8, 3]))
    dataset = dataset.map(lambda x: batches.split(x, batches.World(0, 2, 4)))
    assert [part.data.shape for part in dataset.element_spec.replicas] == [(2, 3), (2, 3)]
    dataset = tf.data.Dataset.from_tensors(tf.zeros([1, 3]))
    dataset = dataset.map(lambda x: batches.split(x, batches.World(0, 2, 2)))
    assert [part.data.shape for part in dataset.element_spec.replicas] == [(1, 3), (1, 3)]


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ValueError, match="batch dimension.*Received: "):
        batches.split({"a": tf.constant(1.0)}, batches.World(0, 1, 2))
