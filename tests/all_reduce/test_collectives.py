import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.all_reduce import collectives, gradients


@given(st.integers(0, 10_000_000))
def test_rows_are_padded_by_an_eighth_at_most(rows):
    padded, index = collectives._size_class(tf.constant(rows))
    assert rows <= int(padded) <= max(1, rows * 9 / 8)
    assert 0 <= int(index) < collectives._SIZE_CLASSES


class FakeLauncher:
    """Two replicas that hold the same: sums are twice the value."""

    def __init__(self):
        self.sizes = []

    def all_reduce(self, tensor):
        self.sizes.append(int(tf.size(tensor)))
        return tensor * 2

    def all_reduce_indexed_slices(self, slices):
        values = tf.concat([slices.values] * 2, 0)
        indices = tf.concat([slices.indices] * 2, 0)
        return tf.IndexedSlices(values, indices, slices.dense_shape)


def test_buckets_go_from_the_last_gradient_back():
    launcher = FakeLauncher()
    grads = [tf.ones([10]) * i for i in range(5)]
    summed = gradients.all_reduce_sum(launcher, grads, bucket_bytes=80)
    assert launcher.sizes == [20, 20, 10]
    for i, total in enumerate(summed):
        np.testing.assert_array_equal(total, np.full(10, 2.0 * i))


def test_dtypes_and_slices_are_kept_apart():
    launcher = FakeLauncher()
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 1]), tf.constant([5, 3]))
    grads = [tf.ones([4]), slices, tf.ones([2, 2], tf.float16), tf.ones([])]
    summed = gradients.all_reduce_sum(launcher, grads)
    assert sorted(launcher.sizes) == [4, 5]
    assert [g.dtype for g in summed] == [g.dtype for g in grads]
    assert [getattr(g, "shape", None) for g in summed if not isinstance(g, tf.IndexedSlices)] == [
        (4,),
        (2, 2),
        (),
    ]
    assert summed[1].indices.shape == [4]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_any_bucket_size_gives_the_same(bucket_bytes):
    grads = [tf.random.normal([3, 2]), tf.random.normal([7])]
    for total, grad in zip(gradients.all_reduce_sum(FakeLauncher(), grads, bucket_bytes), grads):
        np.testing.assert_array_equal(total, grad * 2)
