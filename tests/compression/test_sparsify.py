import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus import compression
from keras_psplus.compression.sparse import nth_largest, ordered_bits, top_k
from tests.compression.common import arrays, at, bytes_of, few, round_trip
from tests.support.tables import for_each


@given(arrays(), st.floats(0.01, 1))
@few
def test_topk_sends_exactly_the_largest(array, density):
    topk = compression.TopK(density)
    decoded = round_trip(topk, array)[0].numpy()
    count = min(array.size, max(1, int(density * array.size)))
    assert topk.wire_bytes(array.shape, "float32") == 6 * count
    kept = decoded != 0
    np.testing.assert_array_equal(decoded[kept], array[kept])
    largest = np.sort(np.abs(array).ravel())[array.size - count :]
    np.testing.assert_array_equal(np.sort(np.abs(decoded[kept])), largest[largest > 0])


def test_what_all_workers_send_is_added_up_at_once():
    rng = np.random.default_rng(0)
    topk = compression.TopK(0.25)
    tensors = [tf.constant(rng.normal(size=(8, 5)), tf.float32) for _ in range(3)]
    payloads = [topk.encode(tensor, (), 0)[0] for tensor in tensors]
    joined = tuple(tf.concat(parts, 0) for parts in zip(*payloads))
    decoded = [topk.decode(payload, [8, 5], tf.float32, 0) for payload in payloads]
    np.testing.assert_allclose(topk.add_rows(joined, [8, 5], 0), sum(decoded), rtol=1e-6)


@for_each("find", [top_k, tf.function(top_k)])
def test_what_is_not_finite_is_among_the_largest_of_many(find):
    for wrong, place in (np.nan, 12345), (np.inf, 300_002), (-np.inf, 12345), (np.nan, 300_002):
        values = np.random.default_rng(0).normal(size=[1, 300_003]).astype("f4")
        values[0, place] = wrong
        found, indices = find(tf.constant(values), 3000)
        assert (np.diff(indices) > 0).all()
        assert place in indices.numpy()
        np.testing.assert_array_equal(found[0], values[0, indices[0].numpy()])


@for_each("zeros, size", [(0.0, 300_007), (0.5, 300_000), (0.995, 300_007), (1.0, 300_000)])
def test_the_largest_of_many_are_the_same_without_sorting(zeros, size):
    rng = np.random.default_rng(0)
    values = rng.normal(size=[1, size]).astype("f4")
    values[rng.random(values.shape) < zeros] = 0
    found, indices = tf.function(lambda m: top_k(m, 3000))(tf.constant(values))
    assert indices.shape == [1, 3000] and (np.diff(indices) > 0).all()
    np.testing.assert_array_equal(found[0], values[0, indices[0].numpy()])
    expected = np.sort(np.abs(values[0]))[-3000:]
    np.testing.assert_array_equal(np.sort(np.abs(found[0])), expected)


def test_the_largest_of_each_row_come_in_order():
    values = np.random.default_rng(0).integers(-9, 9, [50, 40]).astype("f4")
    found, indices = tf.function(lambda m, k: top_k(m, k))(tf.constant(values), tf.constant(13))
    assert indices.shape == [50, 13] and (np.diff(indices) > 0).all()
    np.testing.assert_array_equal(found, np.take_along_axis(values, indices.numpy(), 1))
    expected = np.sort(np.abs(values), 1)[:, -13:]
    np.testing.assert_array_equal(np.sort(np.abs(found), 1), expected)


def test_density_falls_exponentially_over_the_warm_up():
    topk = compression.TopK(0.001, warmup_epochs=4, steps_per_epoch=10)
    encode = tf.function(lambda x, step: topk.encode(x, (), step)[0])
    tensor = tf.random.normal([10_000])
    counts = []
    for step in 0, 9, 10, 25, 39, 40, 1000:
        payload = encode(tensor, at(step))
        assert bytes_of(payload) == topk.wire_bytes([10_000], "float32", step)
        counts.append(int(tf.size(payload[0])))
    # 75, 93.7, 98.4 and 99.6 % of sparsity, as in the paper.
    assert counts == [2511, 2511, 630, 158, 39, 10, 10]
    assert topk.wire_bytes([10_000], "float32") == 60


def test_randomk_takes_one_place_of_each_stretch_alike_on_all_workers():
    randomk = compression.RandomK(0.1)
    array = np.arange(1, 104, dtype="f4")
    seen = set()
    arrives = tf.function(lambda array, step: round_trip(randomk, array, step=step)[0])
    for step in range(300):
        decoded = arrives(array, at(step)).numpy()
        other = arrives(-array, at(step)).numpy()
        np.testing.assert_array_equal(decoded, -other)
        indices = np.flatnonzero(decoded)
        assert len(indices) == 10
        segments = np.searchsorted(np.arange(11) * 103 // 10, indices, side="right") - 1
        np.testing.assert_array_equal(segments, np.arange(10))
        seen.update(indices)
    assert len(seen) == 103


def test_randomk_is_unbiased_when_asked():
    randomk = compression.RandomK(0.25, unbiased=True)
    array = np.linspace(-1, 1, 30, dtype="f4")
    encode = tf.function(lambda step: round_trip(randomk, array, step=step)[0])
    mean = np.mean([encode(at(step)) for step in range(1500)], 0)
    np.testing.assert_allclose(mean, array, atol=0.2)
    assert not randomk.error_feedback and compression.RandomK(0.25).error_feedback


def test_unbiased_scaling_saturates_float16():
    array = tf.constant([6e4] * 8, tf.float16)
    decoded, _ = round_trip(compression.RandomK(0.25, unbiased=True), array)
    assert np.isfinite(decoded).all()


@given(arrays(max_dims=1), st.data())
@few
def test_the_nth_largest_is_found_by_bisection(array, data):
    array = np.abs(array)
    n = data.draw(st.integers(1, max(1, array.size)))
    if array.size:
        bits = ordered_bits(tf.constant(array))
        for digit in 1, 2, 4:
            found = tf.cast(nth_largest(bits, n, digit), tf.int32)
            assert tf.bitcast(found, tf.float32) == np.sort(array)[-n]
