"""What every compressor promises."""

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import ALL, FEW, at, bytes_of, round_trip
from tests.support.tables import for_each

SHAPES = [(40, 30), (33,), (1,), (), (0,), (3, 0)]
BAD = np.nan, np.inf, -np.inf
each = for_each("compressor", ALL)
# The first ones take all paths.
in_graphs = for_each("compressor", FEW)


@each
@for_each("dtype", ["float32", "float16", "bfloat16"])
def test_shapes_dtypes_and_bytes(compressor, dtype):
    for shape in SHAPES if dtype == "float32" else SHAPES[:1]:
        tensor = tf.cast(tf.random.stateless_normal(shape, [1, 2]), dtype)
        for step in 0, 9:
            state = compressor.init(tensor.shape, dtype)
            payload, state = compressor.encode(tensor, state, at(step))
            decoded = compressor.decode(payload, shape, dtype, at(step))
            assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
            assert bytes_of(payload) == compressor.wire_bytes(shape, dtype, step)
            assert np.isfinite(decoded.numpy().astype("f4")).all()
            tf.nest.assert_same_structure(state, compressor.init(tensor.shape, dtype))


@each
def test_zeros_stay_zeros(compressor):
    decoded, state = round_trip(compressor, tf.zeros([40, 30]))
    np.testing.assert_array_equal(decoded, np.zeros([40, 30]))
    decoded, _ = round_trip(compressor, tf.ones([40, 30]), state, step=9)
    assert np.any(decoded)


@each
def test_what_is_not_finite_arrives_and_leaves_no_trace(compressor):
    tensor = np.ones([40, 30], "f4")
    _, state = round_trip(compressor, tensor)
    for bad, place in zip(BAD, ((0, 0), (17, 5), (39, 29))):
        wrong = tensor.copy()
        wrong[place] = bad
        decoded, after = round_trip(compressor, wrong, state, step=1)
        assert not np.isfinite(decoded).all()
        decoded, _ = round_trip(compressor, tensor, after, step=2)
        assert np.isfinite(decoded).all()


@in_graphs
def test_what_is_not_finite_arrives_in_graphs(compressor):
    """Which TensorFlow rewrites, such as `not x <= y` to `x > y`: NaN is the one, not the other."""
    # As many as are not sorted as they are, and some that fill no word.
    shape = [367, 211]

    @tf.function(autograph=False)
    def in_graph(tensor, state, step):
        payload, state = compressor.encode(tensor, state, step)
        return compressor.decode(payload, shape, tf.float32, step), state

    tensor = np.random.default_rng(0).normal(size=shape).astype("f4")
    _, state = in_graph(tensor, compressor.init(shape, tf.float32), at(0))
    for bad in BAD:
        for place in (0, 0), (170, 50), (366, 210):
            wrong = tensor.copy()
            wrong[place] = bad
            decoded, after = in_graph(tf.constant(wrong), state, at(1))
            assert not np.isfinite(decoded).all()
            tf.nest.map_structure(np.testing.assert_array_equal, after, state)


@pytest.mark.extended
@in_graphs
def test_graphs_give_the_same_as_eager_calls(compressor):
    tensor = tf.random.stateless_normal([40, 30], [3, 4])
    state = compressor.init(tensor.shape, tensor.dtype)

    @tf.function(input_signature=[tf.TensorSpec([40, 30]), tf.TensorSpec([], tf.int64)])
    def in_graph(tensor, step):
        payload, new_state = compressor.encode(tensor, state, step)
        fixed = all(part.shape.is_fully_defined() for part in payload)
        assert fixed or compressor.start_step or getattr(compressor, "warmup_epochs", 0)
        return compressor.decode(payload, [40, 30], tf.float32, step), new_state

    for step in 0, 4:
        decoded, after = in_graph(tensor, at(step))
        expected, expected_after = round_trip(compressor, tensor, step=step)
        np.testing.assert_allclose(decoded, expected, atol=1e-5)
        for ours, theirs in zip(tf.nest.flatten(after), tf.nest.flatten(expected_after)):
            np.testing.assert_allclose(ours, theirs, atol=1e-3)


@in_graphs
def test_rows_of_indexed_slices(compressor):
    """As an embedding's gradient comes: any number of rows, indices beside them."""
    for row_shape in (6,), (4, 10):

        @tf.function(
            input_signature=[tf.TensorSpec([None, *row_shape]), tf.TensorSpec([], tf.int64)]
        )
        def in_graph(values, step, row_shape=row_shape):
            payload = compressor.encode_rows(values, step)
            return payload, compressor.decode_rows(payload, row_shape, tf.float32, step)

        values = tf.random.stateless_normal([5, *row_shape], [5, 6])
        payload, decoded = in_graph(values, at(1))
        assert decoded.shape == values.shape
        assert bytes_of(payload) == 5 * compressor.row_bytes(row_shape, "float32", 1)
        assert all(part.shape[0] == 5 for part in payload)
        # Each row is what it would be by itself, but for random rounding.
        if not getattr(compressor, "stochastic", False):
            np.testing.assert_array_equal(in_graph(values[2:3], at(1))[1], decoded[2:3])
        bad = tf.tensor_scatter_nd_update(
            tf.reshape(values, [5, -1]), [[3, 1]], [np.float32(np.nan)]
        )
        arrived = in_graph(tf.reshape(bad, values.shape), at(1))[1].numpy()
        assert [np.isfinite(row).all() for row in arrived] == [True, True, True, False, True]
        assert in_graph(values[:0], at(1))[1].shape == (0, *row_shape)


@for_each("compressor", [c for c in ALL if c.supports_reduce_scatter])
def test_payloads_of_workers_are_rows_of_one(compressor):
    """What a quantised all-reduce relies on: gathered payloads are decoded together."""
    inner = getattr(compressor, "inner", compressor)
    tensors = tf.random.stateless_normal([3, 50], [7, 8])
    payloads = [inner.encode(tensors[i], (), at(0))[0] for i in range(3)]
    gathered = [tf.concat(parts, 0) for parts in zip(*payloads)]
    rows = inner.decode_rows(tuple(gathered), [50], tf.float32, at(0))
    for row, payload in zip(rows, payloads):
        np.testing.assert_array_equal(row, inner.decode(payload, [50], tf.float32, at(0)))


@each
def test_repr_names_the_options(compressor):
    names = vars(compression) | {"compression": compression}
    assert repr(eval(repr(compressor), dict(names))) == repr(compressor)
