import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import at, bytes_of, round_trip
from tests.docs import pages


@pytest.fixture(scope="module")
def blocks():
    return [block.text for block in pages.blocks(pages.ROOT / "docs" / "architecture.md")]


def test_the_manuals_lines_for_a_loop_of_ones_own_run(blocks):
    names = {}
    exec(next(block for block in blocks if "compressor.encode" in block), names)
    assert np.count_nonzero(names["gradient"]) == 10_000
    assert bytes_of(names["payload"]) == 60_060


def test_the_manuals_own_compressor_keeps_the_promises(blocks):
    names = {}
    exec(next(block for block in blocks if "class Levels" in block), names)
    own = names["Levels"]()
    assert compression.get(own) is own
    for dtype in "float32", "float16":
        tensor = tf.cast(tf.random.stateless_normal([30, 20], [1, 2]), dtype)
        payload, _ = own.encode(tensor, (), at(0))
        assert bytes_of(payload) == own.wire_bytes(tensor.shape, dtype)
        restored = compression.unpack(compression.pack(payload), payload)
        decoded = own.decode(restored, tensor.shape, dtype, at(0))
        np.testing.assert_allclose(decoded, tensor, atol=0.02)
    for bad in np.nan, np.inf:
        assert not np.isfinite(round_trip(own, [1.0, bad, 0.0])[0]).all()
    np.testing.assert_array_equal(round_trip(own, tf.zeros([3]))[0], [0, 0, 0])
    feedback = compression.with_error_feedback(own)
    tensor = tf.random.stateless_normal([30, 20], [3, 4])
    decoded, state = round_trip(feedback, tensor)
    np.testing.assert_allclose(decoded + state["residual"], tensor, atol=1e-6)
