"""Rows as words."""

import numpy as np
import tensorflow as tf

from keras_psplus.hybrid.rows import MESSAGE_BYTES, RowCodec, compressor_for_rows
from tests.support.tables import for_each

STEP = tf.constant(0, tf.int64)


@for_each(
    "name, width, tolerance",
    [(None, 10, 0), ("bf16", 5, 1e-2), ("fp16", 5, 1e-3), ("int8", 4, 1e-2)],
)
def test_rows_come_back(name, width, tolerance):
    codec = RowCodec(compressor_for_rows("row_compression", name), 10)
    assert codec.width == width

    @tf.function(input_signature=[tf.TensorSpec([None, 10])])
    def there_and_back(rows):
        words = codec.encode(rows, STEP)
        return words, codec.decode(words, STEP)

    for count in (0, 1, 7):
        rows = np.random.default_rng(count).uniform(-1, 1, (count, 10)).astype("float32")
        words, back = there_and_back(rows)
        assert words.shape == (count, width)
        np.testing.assert_allclose(back, rows, atol=tolerance)


def test_a_message_of_as_many_rows_is_small_enough():
    codec = RowCodec(None, 33)
    assert codec.rows_per_message * (4 * 33 + 4) <= MESSAGE_BYTES < 4 << 20
