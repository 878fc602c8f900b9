"""Batches that a worker reads come with one message, if they fit end to end."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.parameter_server import data
from keras_psplus.parameter_server.data import WorkerReads, fit_end_to_end
from keras_psplus.parameter_server.worker_function import (
    ClosureVariable,
    JoinedBatches,
    Trace,
    current_trace,
    separate,
)
from tests.support.tables import for_each


@pytest.fixture(autouse=True)
def worker(monkeypatch):
    """This process is the worker, too."""
    monkeypatch.setattr(data, "on_worker", lambda index: contextlib.nullcontext())


def numbers(count):
    dataset = tf.data.Dataset.range(count)
    return dataset.map(lambda n: {"x": tf.fill([3], tf.cast(n, tf.float32)), "y": n}).batch(2)


def test_batches_are_joined_and_separated_again():
    dataset = numbers(13)
    reads, iterator = WorkerReads(dataset.element_spec, joins=True), iter(dataset)
    found = []
    for expected in (3, 3, 1, 0):
        batches = reads.take(iterator, 0, 3)
        assert len(batches) == expected
        if batches:
            assert isinstance(batches, JoinedBatches)
            found += separate(batches.payload, dataset.element_spec)
    for batch, wanted in zip(found, numbers(13), strict=True):
        np.testing.assert_array_equal(batch["x"], wanted["x"])
        np.testing.assert_array_equal(batch["y"], wanted["y"])


@for_each("joins, count", [(True, 1), (False, 3)])
def test_batches_come_one_by_one(joins, count):
    dataset = numbers(8)
    batches = WorkerReads(dataset.element_spec, joins).take(iter(dataset), 0, count)
    assert isinstance(batches, list) and len(batches) == count
    np.testing.assert_array_equal(batches[-1]["y"], [2 * count - 2, 2 * count - 1])


@for_each(
    "spec, fits",
    [
        ((tf.TensorSpec([None, 3]), tf.TensorSpec([8], tf.int64)), True),
        (tf.TensorSpec([None, None]), False),
        (tf.TensorSpec([]), False),
        (tf.TensorSpec(None), False),
        (tf.RaggedTensorSpec([None, None]), False),
        (tf.SparseTensorSpec([None, 3]), False),
        ((), False),
    ],
)
def test_what_fits_end_to_end(spec, fits):
    assert fit_end_to_end(spec) == fits


def test_what_does_not_fit_is_read_as_it_is():
    dataset = tf.data.Dataset.range(1, 5).map(lambda n: tf.range(n))
    dataset = dataset.ragged_batch(2)
    batches = WorkerReads(dataset.element_spec, joins=True).take(iter(dataset), 0, 2)
    assert [batch.to_list() for batch in batches] == [[[0], [0, 1]], [[0, 1, 2], [0, 1, 2, 3]]]


def test_an_error_of_the_data_is_the_errors_own():
    dataset = tf.data.Dataset.range(6).batch(2)
    dataset = dataset.map(
        lambda n: tf.debugging.check_numerics(1.0 / tf.cast(n - 3, tf.float32), "here")
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="here"):
        WorkerReads(dataset.element_spec, joins=True).take(iter(dataset), 0, 3)


@for_each("before, change", [(1.0, 2.0), (np.inf, 0.0)])
def test_an_infinite_total_changes_by_nothing(before, change):
    total = ClosureVariable(tf.Variable(0.0), "total")

    @tf.function
    def step(initial):
        with current_trace.being(Trace(initial)) as trace:
            total.assign_add(2.0)
            return trace.changes()

    assert step(tf.constant([before], tf.float64)).numpy().tolist() == [change]
