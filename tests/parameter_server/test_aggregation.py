"""Sums of gradients beside their variables: what is of another attempt does not get in."""

import types

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.parameter_server import aggregation
from keras_psplus.parameter_server.replica_step import WorkerReplicaStep
from tests.support.tables import for_each


def rows(values, indices):
    return tf.IndexedSlices(tf.convert_to_tensor(values), tf.constant(indices), tf.constant([4, 2]))


def dense_of(gradient):
    return tf.convert_to_tensor(gradient).numpy()


@pytest.fixture
def variable():
    return tf.Variable(tf.zeros([4, 2]))


@for_each("has_rows", [False, True])
def test_who_waits_for_gradients_that_will_not_come_is_released(has_rows, variable):
    gradient, made = rows([[1.0, 1.0]], [2]) if has_rows else tf.ones([4, 2]), []

    @tf.function(autograph=False)
    def add(stamp):
        made[:] = aggregation.add([(gradient, variable)], stamp, f"release/{has_rows}")

    @tf.function(autograph=False)
    def release(stamp):
        for one in aggregation.each(made):
            one.release(stamp, tf.constant(3))

    @tf.function(autograph=False)
    def take(stamp):
        return aggregation.take(made, stamp, tf.constant(3), tf.constant(1.0))[0]

    @tf.function(autograph=False)
    def discard(stamp):
        for one in aggregation.each(made):
            one.discard(stamp)

    for number in (1, 2):
        stamp = tf.constant(number, tf.int64)
        add(stamp)
        release(stamp)
        # Without, two of three gradients would be waited for for ever.
        np.testing.assert_allclose(dense_of(take(stamp)), dense_of(gradient))
        discard(stamp + 1)


@for_each("has_rows", [False, True])
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
        for one in aggregation.each(made):
            one.discard(stamp)

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
    name, variables, _iterations = "sgd", (), None


NO_SUMS = np.zeros(0)


def handed_over(twice=False, in_branch=False):
    pushed = []

    @tf.function(autograph=False)
    def step(weight):
        optimizer = Optimizer()
        with WorkerReplicaStep(
            None, weight, NO_SUMS, lambda *args: pushed.append(args)
        ) as replica_step:
            if in_branch:
                tf.cond(
                    weight > 0, lambda: replica_step.hand_over(optimizer, [], []) or 1, lambda: 2
                )
            replica_step.hand_over(optimizer, [], [])
            replica_step.hand_over(optimizer if twice else Optimizer(), [], [])

    step.get_concrete_function(tf.TensorSpec([], tf.float64))
    return len(pushed)


def test_gradients_are_handed_over_once_for_each_optimizer():
    assert handed_over() == 2
    with pytest.raises(ValueError, match=r"Received: sgd.apply\(\), called twice"):
        handed_over(twice=True)
    with pytest.raises(ValueError, match=r"called in a loop, a branch or a tf.function"):
        handed_over(in_branch=True)


def test_scales_of_float8_are_refused_by_name():
    scale = types.SimpleNamespace(path="dense/scale", overwrite_with_gradient=True)
    engine = types.SimpleNamespace(strategy=types.SimpleNamespace(num_workers=2))

    @tf.function(autograph=False)
    def step(weight):
        with WorkerReplicaStep(engine, weight, NO_SUMS, None) as replica_step:
            replica_step.hand_over(Optimizer(), [tf.constant(1.0)], [scale])

    with pytest.raises(ValueError, match="float8 is not supported.*Received: dense/scale"):
        step.get_concrete_function(tf.TensorSpec([], tf.float64))


def a_step(change, log=False, changes=None):
    """Traces a worker's part of a step that computes with what the tape gives.

    Args:
        change: Function of the list of gradients.
        log: Whether the step computes with them after they are handed over.
        changes: "inside" or "outside" of the function that computes them, or None without one.
    """
    variable = tf.Variable([1.0, 2.0])
    pushed = []

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        return replica_step.note([tape.gradient(loss, variable)], [variable])

    @tf.function(autograph=False)
    def step(weight):
        nonlocal replica_step
        replica_step = WorkerReplicaStep(None, weight, NO_SUMS, lambda *args: pushed.append(args))
        with replica_step:
            inner = (lambda: change(gradients())) if changes == "inside" else gradients
            given = tf.function(inner)() if changes else gradients()
            handed = given if changes == "inside" else change(given)
            of_keras = types.SimpleNamespace(_value=variable, path="weight")
            replica_step.hand_over(Optimizer(), handed, [of_keras])
            if log:
                tf.linalg.global_norm(given)

    replica_step = None
    step.get_concrete_function(tf.TensorSpec([], tf.float64))
    return len(pushed)


def test_a_worker_hands_its_part_of_a_gradient_on_as_it_is():
    assert a_step(list) == 1
    assert a_step(list, changes="inside") == 1
    assert a_step(list, changes="outside") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"change": lambda grads: tf.clip_by_global_norm(grads, 0.1)[0]},
        {"change": lambda grads: tf.clip_by_global_norm(grads, 0.1)[0], "changes": "inside"},
        {"change": lambda grads: tf.clip_by_global_norm(grads, 0.1)[0], "changes": "outside"},
        {"change": list, "log": True},
    ],
    ids=["changed", "changed in a function", "changed behind one", "used afterwards"],
)
def test_a_step_that_computes_with_its_part_of_a_gradient_is_refused(arguments):
    with pytest.raises(ValueError, match=r"one worker's part.*global_clipnorm.*Received: "):
        a_step(**arguments)
