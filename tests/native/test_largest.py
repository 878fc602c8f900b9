"""The kernels for top-k, beside TensorFlow's own operations, bit by bit."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_psplus import compression, native
from keras_psplus.compression import wire as fused
from tests.compression.common import at
from tests.support.tables import for_each
from tests.support.tiers import extended

kernels = native.kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason="no C++ compiler, or a GPU")
# A stretch of places has 65,536 elements, and a part of one thread four of them.
SIZES = [1, 7, 100, 65_536, 65_537, 70_001, 600_000]
KINDS = ["normal", "equal", "few values", "mostly zeros", "zeros", "few not finite"]
KINDS += ["nothing finite", "silent columns", "tiny"]


def filled(kind, size, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=size).astype("f4")
    if kind == "equal":
        values = np.sign(values)
    elif kind == "few values":
        values = np.round(values)
    elif kind == "mostly zeros":
        values[rng.random(size) < 0.999] = 0
    elif kind == "zeros":
        values[:] = 0
    elif kind == "few not finite":
        values[rng.integers(size, size=3)] = [np.nan, -np.inf, np.inf]
    elif kind == "nothing finite":
        values[:] = np.nan
    elif kind == "silent columns":
        # Of a sample that meets few columns, hardly any is large.
        values[np.arange(size) % 100 != 3] *= 1e-20
    elif kind == "tiny":
        values *= np.float32(1e-40)
    return values


@pytest.mark.parametrize(
    "size, density",
    [
        *((1, 1.0), (100, 0.01), (65_537, 0.01), (70_001, 1.0)),
        *extended((65_536, 1.0), (600_000, 0.01)),
    ],
)
def test_the_same_elements_are_taken(size, density):
    feedback = compression.ErrorFeedback(compression.TopK(density))

    @functools.partial(tf.function, autograph=False)
    def both_ways(tensor, residual):
        state = {"residual": residual, "inner": ()}
        encoders = functools.partial(fused.encode, feedback), feedback.encode
        return [encode(tensor, state, at(0)) for encode in encoders]

    for kind in KINDS:
        tensor, residual = filled(kind, size), 0.1 * filled("normal", size, seed=1)
        if kind not in ("normal", "few not finite"):
            residual[:] = 0
        (payload, state), (expected, expected_state) = both_ways(tensor, residual)
        assert len(payload) == len(expected)
        for one, other in zip(payload, expected):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(one, other, err_msg=kind)
        np.testing.assert_array_equal(state["residual"], expected_state["residual"], err_msg=kind)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_left_and_what_is_taken_are_the_sum(data):
    size = data.draw(st.integers(1, 80_000))
    count = data.draw(st.integers(1, size))
    numbers = np.random.default_rng(data.draw(st.integers(0, 99)))
    a, b = numbers.normal(size=(2, size)).astype("f4").round(data.draw(st.integers(0, 3)))
    values, low, starts, left = kernels.keras_psplus_take_largest(
        residual=a, tensor=tf.constant(b), count=count
    )
    assert np.count_nonzero((a + b) - left.numpy()) <= count
    taken = kernels.keras_psplus_add_up(values=values, low=low, starts=starts, size=size)
    np.testing.assert_array_equal(left + taken, a + b)
    assert np.abs(left).max() <= np.abs(values).min()


@for_each("size", SIZES)
@for_each("workers", [1, 3])
def test_sums_of_workers_are_the_same(size, workers):
    topk = compression.TopK(0.05)
    tensors = [tf.constant(filled("normal", size, seed)) for seed in range(workers)]
    payloads = [topk.encode(t, (), at(0))[0] for t in tensors]
    joined = tuple(tf.concat(parts, 0) for parts in zip(*payloads))
    found = fused.add_rows(compression.ErrorFeedback(topk), joined, (size,), at(0))
    np.testing.assert_array_equal(found, topk.add_rows(joined, (size,), at(0)))
    assert found.shape == (size,)


@for_each(
    "low, starts, message",
    [
        ([[1, 5]], [[1]], "places must be below 65541"),
        ([[1, 4]], [[3]], "places"),
        ([[1, 4]], [[-1]], "places"),
        ([[1]], [[1]], "must have a row for each other"),
        ([[1, 4]], [[1, 1]], "must have a row for each other"),
    ],
)
def test_places_that_are_none_are_refused(low, starts, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        kernels.keras_psplus_add_up(
            values=[[1.0, 2.0]],
            low=tf.constant(low, tf.uint16),
            starts=tf.constant(starts, tf.int32),
            size=65_541,
        )


def test_tensors_of_two_sizes_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="of one size"):
        kernels.keras_psplus_take_largest(residual=tf.zeros([3]), tensor=tf.zeros([4]), count=1)


class Own(compression.TopK):
    """May take what it likes."""


@for_each(
    "compressor",
    [
        compression.TopK(0.1),
        compression.ErrorFeedback(Own(0.1)),
        compression.ErrorFeedback(compression.TopK(0.1), momentum=0.9),
        compression.ErrorFeedback(compression.TopK(0.1, warmup_epochs=1, steps_per_epoch=2)),
        compression.ErrorFeedback(compression.TopK(0.1)).times(2),
        compression.ErrorFeedback(compression.Sign()),
    ],
)
def test_others_are_encoded_by_themselves(compressor):
    tensor = tf.constant(filled("normal", 1000))
    state = compressor.init(tensor.shape, tensor.dtype)
    graph = tf.function(lambda t: fused.encode(compressor, t, state, at(0))).get_concrete_function(
        tensor
    )
    assert not [op for op in graph.graph.get_operations() if "KerasPsplus" in op.type]


def test_halves_are_encoded_by_themselves():
    feedback = compression.ErrorFeedback(compression.TopK(0.1))
    tensor = tf.cast(filled("normal", 1000), tf.float16)
    payload, _ = fused.encode(feedback, tensor, feedback.init([1000], tf.float16), at(0))
    assert payload[0].dtype == tf.float16
    total = fused.add_rows(feedback, payload, (1000,), at(0))
    np.testing.assert_array_equal(total, feedback.add_rows(payload, (1000,), at(0)))
