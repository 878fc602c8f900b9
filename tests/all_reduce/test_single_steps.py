"""Steps on an iterator, with a function like that which Keras makes."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.all_reduce.step import replica_functions


def numbers(*shape):
    return tf.data.Dataset.from_tensor_slices(np.arange(np.prod(shape), dtype="f4").reshape(shape))


class Doubling:
    """Counts how often it is traced and called, in a variable that the first call makes."""

    def __init__(self):
        self.traces, self.calls = 0, None

    def __call__(self, batches):
        self.traces += 1
        (batch,) = batches
        if self.calls is None:
            self.calls = tf.Variable(0)
        self.calls.assign_add(1)
        return {"doubled": 2 * batch, "nested": (batch, tf.shape(batch))}


def test_results_are_those_of_each_batch():
    step = replica_functions.single_steps_of(Doubling(), 1)
    iterator = iter(numbers(4, 3))
    for i in range(4):
        results = step(iterator)
        expected = np.arange(3 * i, 3 * i + 3, dtype="f4")
        np.testing.assert_array_equal(results["doubled"], 2 * expected)
        np.testing.assert_array_equal(results["nested"][0], expected)
        np.testing.assert_array_equal(results["nested"][1], [3])


def test_the_end_of_the_data_is_said_as_keras_expects_it():
    step = replica_functions.single_steps_of(Doubling(), 1)
    for length in 0, 1, 2:
        iterator = iter(numbers(length, 3))
        for _ in range(length):
            step(iterator)
        with pytest.raises(tf.errors.OutOfRangeError):
            step(iterator)


def test_one_trace_serves_all_iterators_of_a_kind():
    function = Doubling()
    step = replica_functions.single_steps_of(function, 1)
    first = iter(numbers(4, 3))
    step(first)
    # TensorFlow traces what has made variables a second time.
    traces = function.traces
    assert traces == 2
    step(first)
    second = iter(numbers(4, 3))
    for iterator in (second, first, second, second):
        step(iterator)
    assert function.traces == traces
    assert function.calls.numpy() == 6


def test_other_batches_get_a_graph_of_their_own():
    step = replica_functions.single_steps_of(Doubling(), 1)
    by_kind = [iter(numbers(9, 3)), iter(numbers(9, 2, 2)), iter(numbers(9, 3).batch(2))]
    for _ in range(2):
        for iterator, shape in zip(by_kind, ([3], [2, 2], [2, 3])):
            for _ in range(2):
                assert step(iterator)["doubled"].shape == shape


def test_functions_run_eagerly_from_one_step_to_the_next():
    function = Doubling()
    step = replica_functions.single_steps_of(function, 1)
    iterator = iter(numbers(9, 3))
    step(iterator)
    step(iterator)
    before = function.traces
    tf.config.run_functions_eagerly(True)
    try:
        for _ in range(3):
            step(iterator)
    finally:
        tf.config.run_functions_eagerly(False)
    assert function.traces == before + 3
    np.testing.assert_array_equal(step(iterator)["nested"][0], [15, 16, 17])


def test_an_iterator_is_not_kept():
    step = replica_functions.single_steps_of(Doubling(), 1)
    iterator = iter(numbers(4, 3))
    step(iterator)
    step(iterator)
    alive = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert alive() is None


def test_a_failed_step_leaves_the_next_one_as_it_was():
    def checked(batches):
        (batch,) = batches
        with tf.control_dependencies([tf.debugging.assert_none_equal(batch, 5.0)]):
            return batch + 0

    step = replica_functions.single_steps_of(checked, 1)
    iterator = iter(numbers(4, 3))
    step(iterator)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(iterator)
    np.testing.assert_array_equal(step(iterator), [6, 7, 8])


def test_several_steps_at_once_are_left_to_keras():
    function = Doubling()
    assert replica_functions.single_steps_of(function, 3) is function
