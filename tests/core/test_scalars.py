"""Numbers that change with each step must not pile up in TensorFlow's cache of Python numbers."""

import sys

import pytest
import tensorflow as tf

from keras_psplus.core.base.optimizers import scalar_tensor


def references_gained(make, number, dtype):
    before = sys.getrefcount(number)
    for _ in range(3):
        make(number, dtype)
    return sys.getrefcount(number) - before


@pytest.mark.parametrize("number, dtype", [(2**40 + 1, tf.int64), (0.125, tf.float32)])
def test_tensorflow_keeps_no_number(number, dtype):
    # What `tf.constant` keeps holds the number as well.
    assert references_gained(tf.constant, number + 1, dtype) == 1
    assert references_gained(scalar_tensor, number, dtype) == 0


@pytest.mark.parametrize("number, dtype", [(7, tf.int32), (2**40 + 1, tf.int64), (0.5, tf.float32)])
def test_value_and_type(number, dtype):
    tensor = scalar_tensor(number, dtype)
    assert (tensor.dtype, tensor.shape.rank, tensor.numpy()) == (dtype, 0, number)
