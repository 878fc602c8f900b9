import numpy as np
import tensorflow as tf
from hypothesis import given

from keras_psplus import compression
from keras_psplus.compression import cast
from tests.compression.common import arrays, few, round_trip
from tests.support.tables import for_each


@for_each("dtype, error", [("bfloat16", 2**-8), ("float16", 2**-11)])
@given(arrays(bound=6e4))
@few
def test_relative_error(dtype, error, array):
    decoded, _ = round_trip(compression.Cast(dtype), array)
    # Below float16's normal range, 6e-5, numbers are rounded to multiples of 6e-8.
    np.testing.assert_array_less(np.abs(decoded - array), np.abs(array) * error + 6.1e-8)


@for_each("on_gpus", [False, True])
def test_float16_saturates_what_is_finite(on_gpus, monkeypatch):
    monkeypatch.setattr(cast, "has_gpus", lambda: on_gpus)
    decoded, _ = round_trip(compression.Cast("float16"), [1e5, -3e38, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(decoded, [65504, -65504, np.inf, -np.inf, np.nan])
    from_bfloat16 = compression.Cast("float16").encode_rows(tf.constant([[1e5]], tf.bfloat16), 0)
    assert from_bfloat16[0].dtype == tf.bfloat16


def test_a_sum_of_float32_that_float16_gradients_cannot_hold_saturates_too():
    arrived = compression.Cast("float16").decode(
        (tf.constant([[1e5]], tf.float32),), [1], tf.float16, 0
    )
    np.testing.assert_array_equal(arrived, [65504])
