"""Micro-batches: their bounds, and what is cut and joined."""

import types

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.keras_internals.keras_parts import get_keras_mask, set_keras_mask
from keras_psplus.pipeline import microbatches


def cut(structure, rows, first, end):
    return microbatches.take(structure, rows, first, end, lambda leaf: leaf.shape[0])


@given(st.integers(1, 300), st.integers(1, 40))
def test_all_rows_are_in_one_and_none_is_empty(rows, count):
    found = microbatches.bounds(rows, count)
    assert len(found) == min(rows, count)
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == rows
    sizes = {end - first for first, end in found}
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1


def test_what_has_no_row_for_each_row_is_given_to_all():
    x, weights = tf.reshape(tf.range(12), (6, 2)), tf.constant([1.0, 2.0])
    part = cut({"x": x, "w": weights, "flag": True, "none": None}, 6, 2, 4)
    np.testing.assert_array_equal(part["x"], x[2:4])
    assert part["w"] is weights
    assert part["flag"] is True
    assert part["none"] is None


@pytest.mark.parametrize("kind", ["dense", "sparse", "ragged"])
def test_what_is_cut_is_joined_again(kind):
    dense = tf.reshape(tf.range(1.0, 15.0), (7, 2))
    tensor = {
        "dense": lambda: dense,
        "sparse": lambda: tf.sparse.from_dense(dense),
        "ragged": lambda: tf.RaggedTensor.from_row_lengths(tf.range(14.0), [3, 0, 2, 4, 1, 1, 3]),
    }[kind]()
    edges = microbatches.bounds(7, 3)
    parts = [cut(tensor, 7, *edge) for edge in edges]
    joined = microbatches.join("layer", parts, [end - first for first, end in edges])
    as_dense = {
        "dense": lambda t: t,
        "sparse": tf.sparse.to_dense,
        "ragged": lambda t: t.to_tensor(),
    }[kind]
    np.testing.assert_array_equal(as_dense(joined), as_dense(tensor))


def test_masks_are_cut_and_joined_as_well():
    tensor, mask = tf.ones((4, 3)), tf.constant([[True, False, True]] * 4)
    set_keras_mask(tensor, mask)
    parts = [cut(tensor, 4, *edge) for edge in ((0, 1), (1, 4))]
    assert get_keras_mask(parts[1]).shape == (3, 3)
    joined = microbatches.join("layer", parts, [1, 3])
    np.testing.assert_array_equal(get_keras_mask(joined), mask)


def test_losses_of_layers_count_by_the_rows_of_their_microbatch():
    layer, none = types.SimpleNamespace(), types.SimpleNamespace()
    found = [[[tf.constant(4.0), tf.constant(1.0)], []], [[tf.constant(8.0), tf.constant(1.0)], []]]
    microbatches.join_losses([layer, none], found, [3, 1])
    assert [float(loss) for loss in layer._losses] == [5.0, 1.0] and none._losses == []


def test_an_output_that_is_no_row_for_each_row_is_refused():
    with pytest.raises(ValueError, match="The layer 'pool' .*Received:.*for 2 rows"):
        microbatches.join("pool", [tf.ones(()), tf.ones(())], [2, 2])


@pytest.mark.parametrize("rows", [6, None])
def test_gradients_pass_where_rows_are_not_known(rows):
    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            other = microbatches.with_unknown_rows(x)
            assert other.shape[0] is None
            loss = tf.reduce_sum(other**2)
        return tape.gradient(loss, x)

    x = tf.ones((6, 2))
    np.testing.assert_array_equal(gradient(x), 2 * x)
