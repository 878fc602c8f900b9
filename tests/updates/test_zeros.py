"""Zeros that take memory only where they are needed."""

import gc

import pytest
import tensorflow as tf

from keras_psplus.all_reduce.step.replica_step import _zeros
from keras_psplus.updates.base import no_rows_of, zeros_like

SIZE = 1 << 20


def test_a_variable_has_its_rows_until_none_are_assigned():
    rows = tf.Variable(tf.zeros([0, 4]), shape=[None, 4])

    @tf.function(autograph=False)
    def take():
        before = rows.read_value()
        sizes = tf.stack([tf.shape(before)[0], tf.size(before)])
        rows.assign(no_rows_of(before), read_value=False)
        return sizes

    rows.assign(tf.ones([20, 4]))
    assert take().numpy().tolist() == [20, 80]
    assert take().numpy().tolist() == [0, 0]


def kept(instead):
    """Bytes that a function keeps which returns a tensor or, by a flag, something instead."""

    @tf.function(autograph=False)
    def choose(flag, tensor):
        return tf.cond(flag, lambda: tf.identity(tensor), lambda: instead(tensor, flag))

    def used():
        gc.collect()
        try:
            return tf.config.experimental.get_memory_info("CPU:0")["current"]
        except ValueError:
            pytest.skip(
                "TensorFlow counts memory where it uses oneDNN, as on CPUs with AVX512_VNNI"
            )

    tensor, before = tf.ones([SIZE]), used()
    assert float(tf.reduce_sum(choose(tf.constant(True), tensor))) == SIZE
    assert float(tf.reduce_sum(choose(tf.constant(False), tensor * float("nan")))) == 0
    return used() - before


@pytest.fixture
def few_objects():
    """Has the collector pass over what there was before."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_zeros_in_a_branch_are_no_constants(few_objects):
    assert kept(lambda tensor, flag: zeros_like(tensor)) < SIZE
    assert kept(_zeros) < SIZE
    # Otherwise they are.
    assert kept(lambda tensor, flag: tf.zeros_like(tensor)) >= 4 * SIZE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [[], [0, 3], [2, 3]])
def test_zeros_are_of_the_same_form(shape, dtype):
    found = zeros_like(tf.ones(shape, dtype))
    assert found.dtype == dtype and found.shape == shape
    assert not tf.reduce_any(tf.cast(found, tf.bool))
