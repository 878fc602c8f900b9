"""Sums of gradients beside their variables: what is of another attempt does not get in."""

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.parameter_server import aggregation
from keras_psplus.parameter_server.shares import Share


def rows(values, indices):
    return tf.IndexedSlices(tf.convert_to_tensor(values), tf.constant(indices), tf.constant([4, 2]))


def dense_of(gradient):
    return tf.convert_to_tensor(gradient).numpy()


@pytest.fixture
def variable():
    return tf.Variable(tf.zeros([4, 2]))


@pytest.mark.parametrize("has_rows", [False, True])
def test_only_what_carries_the_stamp_counts(has_rows, variable):
    def gradient(number):
        if has_rows:
            return rows([[number, 1.0], [number, 2.0]], [3, 3])
        return tf.fill([4, 2], number)

    made = []

    @tf.function(autograph=False)
    def add(number, stamp):
        made[:] = aggregation.add([(gradient(number), variable)], stamp, f"test/{has_rows}")

    @tf.function(autograph=False)
    def discard(stamp):
        aggregation.discard(made, stamp)

    @tf.function(autograph=False)
    def take(stamp, count, scale):
        return aggregation.take(made, stamp, count, scale)[0]

    def stamp(number):
        return tf.constant(number, tf.int64)

    one, two = tf.constant(1.0), tf.constant(2.0)
    add(one, stamp(1))
    add(one, stamp(1))
    # A worker is lost: what is there goes, and what one that was given up still sends is let go.
    discard(stamp(2))
    add(one, stamp(1))
    add(two, stamp(2))
    add(one, stamp(1))
    add(one, stamp(2))
    expected = dense_of(gradient(one)) + dense_of(gradient(two))
    np.testing.assert_allclose(dense_of(take(stamp(2), 2, 1.0)), expected)
    # The next step, of one gradient that counts for half of the rows.
    add(one, stamp(2))
    add(two, stamp(3))
    taken = take(stamp(3), 1, 2.0)
    np.testing.assert_allclose(dense_of(taken), 2 * dense_of(gradient(two)))
    if has_rows:
        # As an optimizer gets them in one process.
        assert taken.indices.numpy().tolist() == [3, 3]


class Optimizer:
    name = "sgd"


def handed_over(twice=False, in_branch=False):
    pushed = []

    @tf.function(autograph=False)
    def step(weight):
        optimizer = Optimizer()
        with Share(weight, lambda *args: pushed.append(args)) as share:
            if in_branch:
                tf.cond(weight > 0, lambda: share.hand_over(optimizer, [], []) or 1, lambda: 2)
            share.hand_over(optimizer, [], [])
            share.hand_over(optimizer if twice else Optimizer(), [], [])

    step.get_concrete_function(tf.TensorSpec([], tf.float64))
    return len(pushed)


def test_gradients_are_handed_over_once_for_each_optimizer():
    assert handed_over() == 2
    with pytest.raises(ValueError, match=r"Received: sgd.apply\(\), called twice"):
        handed_over(twice=True)
    with pytest.raises(ValueError, match=r"called in a loop, a branch or a tf.function"):
        handed_over(in_branch=True)
