import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.compression import sparse as two_bytes
from tests.compression.common import bytes_of, few, use_gpus
from tests.support.tables import for_each

STRETCH = 1 << 16
# Of one stretch, one more element, and stretches of which some are empty.
SIZES = [1, 300, STRETCH, STRETCH + 1, 5 * STRETCH - 7, 40 * STRETCH]


@for_each("gpus", [0, 1])
@for_each("size", [1, 300, STRETCH + 1])
def test_indices_come_back(gpus, size, monkeypatch):
    use_gpus(monkeypatch, gpus)

    @given(st.data())
    @few
    def check(data):
        rows, count = data.draw(st.integers(1, 3)), data.draw(st.integers(0, min(size, 40)))
        place = st.integers(0, size - 1) | st.sampled_from([0, size - 1])
        row = st.lists(place, min_size=count, max_size=count, unique=True).map(sorted)
        drawn = data.draw(st.lists(row, min_size=rows, max_size=rows))
        indices = np.array(drawn, "int32").reshape(rows, count)
        encoded = two_bytes.encode_indices_u16(tf.constant(indices), size)
        assert bytes_of(encoded) == rows * two_bytes.index_bytes(count, size)
        np.testing.assert_array_equal(two_bytes.decode_indices_u16(*encoded), indices)

    check()


@for_each("gpus", [0, 1])
@for_each("size", SIZES[2:])
def test_numbers_of_rows_and_indices_may_be_unknown(gpus, size, monkeypatch):
    use_gpus(monkeypatch, gpus)
    rng = np.random.default_rng(0)
    indices = np.sort([rng.choice(size, 1000, replace=False) for _ in range(2)]).astype("int32")
    function = tf.function(
        lambda found: two_bytes.decode_indices_u16(*two_bytes.encode_indices_u16(found, size)),
        input_signature=[tf.TensorSpec([None, None], tf.int32)],
    )
    np.testing.assert_array_equal(function(indices), indices)
