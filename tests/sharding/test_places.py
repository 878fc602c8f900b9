"""Owners, and parts of gradients of rows."""

import types

import numpy as np
import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import Hop, Route
from keras_psplus.sharding import sums
from keras_psplus.sharding.places import AxisCut, PieceCut, Place
from tests.support.tables import for_each


class Alone:
    """Collectives of a worker whose peers have sent zeros, or the same."""

    all_to_all = staticmethod(lambda rows: tf.concat([rows[:1], tf.zeros_like(rows[1:])], 0))
    gather = staticmethod(lambda row: tf.repeat(row, 2, 0))
    all_reduce = staticmethod(tf.identity)


@for_each("workers, of_each", [(4, ()), (3, (3,))])
def test_parts_of_rows_add_up_to_the_gradient(workers, of_each):
    values = tf.random.normal([6, 3])
    slices = tf.IndexedSlices(values, tf.constant([4, 0, 4, 2, 1, 0]), tf.constant([6, 3]))
    # Four workers have each a row and a half.
    place = Place.of_parts((6, 3), workers)
    parts = [sums.part_of_slices(slices, place.cut, rank) for rank in range(workers)]
    assert sum(tf.size(part.values) for part in parts) == 18
    assert all(part.values.shape[1:] == of_each for part in parts)
    whole = place.cut.whole(tf.stack([tf.convert_to_tensor(part) for part in parts]))
    np.testing.assert_allclose(whole, tf.convert_to_tensor(slices), rtol=1e-6)


def test_owners_receive_their_sums():
    shapes = [tf.TensorShape(shape) for shape in ([2, 2], [3], [4])]
    tensors = [tf.ones([2, 2]), tf.range(3.0), 2 * tf.ones([4])]
    layout = sums.OwnerLayout(shapes, [0, 1, 1], 2)
    found = layout.scatter(Route(Hop(Alone(), range(2), 0)), tensors, 0)
    np.testing.assert_array_equal(found[0], np.ones((2, 2)))
    assert found[1] is None and found[2] is None
    assert layout.widths == [-(-7 * n // 11) for n in (4, 3, 4)]


def test_one_large_tensor_is_all_reduced():
    layout = sums.OwnerLayout([tf.TensorShape([90]), tf.TensorShape([2])], [0, 1], 3)
    found = layout.scatter(Route(Hop(Alone(), range(3), 1)), [tf.ones([90]), tf.ones([2])], 1)
    assert found[0] is None and found[1].shape == (2,)
    # No more than twice an all-reduce, with the values: 2 / 3 of all to each of the others.
    assert sum(layout.widths) <= 2 * 92 / 3 + 2


@for_each("limit", [{"clipnorm": 2.5}, {"global_clipnorm": 6.5}])
def test_parts_are_clipped_by_the_norm_of_the_whole(limit):
    optimizer = types.SimpleNamespace(**{"clipnorm": None, "global_clipnorm": None, **limit})
    # One that is whole, and a part of one whose other part has a norm of 4.
    grads = [tf.constant([0.0, 12.0]), tf.constant([3.0, 0.0])]
    found = sums.clipped_by_norms(
        optimizer, grads, tf.float32, [1], lambda squares: [squares[0] + 16]
    )
    scales = (2.5 / 12, 2.5 / 5) if "clipnorm" in limit else (0.5, 0.5)
    for clipped, gradient, scale in zip(found, grads, scales, strict=True):
        np.testing.assert_allclose(clipped, gradient * scale, rtol=1e-6)


@for_each("axis", [None, 0, 1])
def test_pieces_of_parts_are_the_whole(axis):
    shape, tensor = tf.TensorShape([4, 6]), tf.reshape(tf.range(24.0), [4, 6])
    split = None if axis is None else AxisCut(shape, axis, 2, copies=3)
    local = shape if split is None else tf.TensorShape(split.shard)
    place = Place(PieceCut(split, Place.of_parts(local, 3).parts, 2))
    rows = tf.stack([tf.reshape(place.local_part(tensor, rank), [-1]) for rank in range(6)])
    assert rows.shape == (6, local.num_elements() // 3)
    np.testing.assert_array_equal(place.cut.whole(rows), tensor)
    if split is None:
        np.testing.assert_array_equal(rows[:3], rows[3:])
    else:
        parts = [Place(split).local_part(tensor, rank) for rank in range(6)]
        np.testing.assert_array_equal(parts[2], parts[0])
        # Of copies that differ, each worker takes those of its own row.
        rows = tf.stack([tf.reshape(part, [-1]) + i % 3 for i, part in enumerate(parts)])
        for rank in range(6):
            np.testing.assert_array_equal(Place(split).whole(rows, rank), tensor + rank % 3)
