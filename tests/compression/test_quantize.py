import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus import compression
from tests.compression.common import arrays, at, few, round_trip


def per_block(array, block, function):
    """Applies a function to each block of a flat array, and spreads its results."""
    flat = array.reshape(-1)
    parts = [flat[i : i + block] for i in range(0, flat.size, block)]
    spread = [np.full(part.size, function(part)) for part in parts]
    return np.concatenate(spread or [flat]).reshape(array.shape)


@given(arrays(), st.sampled_from([1, 3, 32, 256]))
@few
def test_int8_is_within_half_a_step(array, block):
    decoded, _ = round_trip(compression.Int8(block), array)
    largest = per_block(array, block, lambda part: np.abs(part).max())
    assert np.all(np.abs(decoded - array) <= largest / 127 / 2 * 1.0001 + 1.6e-36)


def test_int8_keeps_the_range_of_float32():
    array = np.float32([3e38, -3e38, 1e38])
    decoded, _ = round_trip(compression.Int8(), array)
    np.testing.assert_allclose(decoded, array, rtol=0.02)


def test_stochastic_rounding_is_right_on_average_and_differs_by_data():
    int8 = compression.Int8(stochastic=True)
    array = np.linspace(-1, 1, 100, dtype="f4")
    draw = tf.function(lambda step: round_trip(int8, array, step=step)[0])
    draws = np.stack([draw(at(step)) for step in range(400)])
    assert np.all(np.abs(draws - array) <= 1 / 127 * 1.0001)
    np.testing.assert_allclose(draws.mean(0), array, atol=5 / 127 / 2 / 20)
    np.testing.assert_array_equal(draws[7], round_trip(int8, array, step=7)[0])
    doubled, _ = round_trip(int8, array * 2, step=7)
    assert not np.array_equal(doubled, draws[7] * 2)
    assert compression.Int8().error_feedback and not int8.error_feedback


@given(arrays(), st.sampled_from([32, 64, 1024]))
@few
def test_signs_and_mean_magnitudes_are_kept(array, block):
    decoded = round_trip(compression.Sign(block), array)[0].numpy()
    mean = per_block(array, block, lambda part: np.abs(part).mean(dtype="f8"))
    np.testing.assert_allclose(np.abs(decoded), mean, rtol=1e-5, atol=1e-37)
    assert np.all(np.where(array < 0, -1, 1) * decoded >= 0)


def test_thirty_two_signs_make_a_word():
    signs = np.where(np.random.default_rng(0).random(320) < 0.5, -1, 1).astype("f4")
    (words, scales), _ = compression.Sign().encode(tf.constant(signs), (), 0)
    assert (words.dtype, words.shape, scales.shape) == (tf.int32, (1, 10), (1, 1))
    packed = np.packbits(signs > 0, bitorder="little").view("<i4")
    np.testing.assert_array_equal(words[0], packed)
