"""Rules of two replicas in threads, beside what they come to by hand."""

import contextlib
import threading
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import updates
from keras_psplus.updates.base import Context, Form

RATE = 0.5


class States:
    def variable(self, name, shape, dtype, on_host=False):
        first = tf.zeros([size or 0 for size in shape], dtype)
        return tf.Variable(first, shape=shape, trainable=False)


class Step:
    """A step of a replica, by its rows and those of all."""

    applying_alone = contextlib.nullcontext

    def __init__(self, own, everything):
        self._rows = tf.constant(float(own)), tf.constant(float(everything))

    def rows(self):
        return self._rows

    def unscale_by_batch_fraction(self, value):
        return value * self._rows[1] / self._rows[0]


@pytest.mark.parametrize("has_rows", [False, True])
def test_accumulated_batches_count_once_and_by_their_rows(has_rows):
    form, applied = Form(tf.float32, tf.int32 if has_rows else None, (4, 2)), []
    rule = updates.Accumulate(2).on_replica(Context(States(), "rule", [form, None], [None] * 2))

    def gradient(number):
        if has_rows:
            return tf.IndexedSlices(tf.fill([1, 2], number), [1], [4, 2])
        return tf.fill([4, 2], number)

    def apply(grads, variables):
        applied.append(tf.convert_to_tensor(grads[0])[1, 0].numpy())
        assert grads[1] is None

    for rows, number in ((3, 1.0), (1, 5.0), (2, 4.0), (4, 1.0), (1, 7.0)):
        rule.on_gradients(Step(1, rows), [gradient(number), None], [], apply)
    rule.on_finish(Step(1, 1), apply)
    rule.on_finish(Step(1, 1), apply)
    np.testing.assert_allclose(applied, [2.0, 2.0, 7.0])


def outer():
    return keras.optimizers.SGD(0.5)


@pytest.mark.parametrize("make_outer", [None, outer])
def test_replicas_that_step_alone_meet_at_the_mean_of_their_ways(make_outer):
    policy = updates.DiLoCo(2, make_outer) if make_outer else updates.LocalSGD(2)
    # By step and replica.
    rows = np.array([[3, 1], [1, 1], [1, 2], [1, 1], [2, 1]])
    grads = np.array([[1.0, 4.0], [2.0, -1.0], [1.0, 3.0], [5.0, 1.0], [2.0, 3.0]])
    barrier, given = threading.Barrier(2, timeout=60), [None, None]

    def work(replica):
        variable = keras.Variable(np.full(3, 8.0, "float32"))

        def sums(tensors, variables, number, compresses):
            given[replica] = tensors
            barrier.wait()
            found = [tf.add_n(each) for each in zip(*given)]
            barrier.wait()
            return found

        def apply(grads, variables):
            variable.assign_sub(RATE * grads[0])

        rule = policy.on_replica(
            Context(States(), "rule", [], [variable], policy.on_build([variable]), sums=sums)
        )
        weights = []
        for of_all, ways in zip(rows, grads):
            step = Step(of_all[replica], of_all.sum())
            part = tf.fill([3], np.float32(ways[replica] * of_all[replica] / of_all.sum()))
            rule.on_gradients(step, [part], [variable], apply)
            weights.append(variable.numpy()[0])
        rule.on_finish(step, apply)
        return [*weights, variable.numpy()[0]]

    with futures.ThreadPoolExecutor(2) as pool:
        found = np.transpose(list(pool.map(work, range(2))))
    weight, scale = 8.0, 0.5 if make_outer else 1.0
    for first, last in ((0, 1), (2, 3), (4, 4)):
        own = rows[first : last + 1].sum(0)
        ways = RATE * grads[first : last + 1].sum(0)
        np.testing.assert_allclose(found[first], weight - RATE * grads[first], rtol=1e-6)
        weight -= scale * ways @ own / own.sum()
        np.testing.assert_allclose(found[last + (first == last)], [weight] * 2, rtol=1e-6)
