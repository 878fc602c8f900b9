"""Rows as words."""

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.hybrid.rows.row_codec import (
    MESSAGE_BYTES,
    RowCodec,
    compressor_for_rows,
)

STEP = tf.constant(0, tf.int64)


@pytest.mark.parametrize(
    "name, width, tolerance",
    [(None, 10, 0), ("bf16", 5, 1e-2), ("fp16", 5, 1e-3), ("int8", 4, 1e-2)],
)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_rows_come_back(name, width, tolerance, count):
    codec = RowCodec(compressor_for_rows("row_compression", name), 10)
    assert codec.width == width
    rows = np.random.default_rng(count).uniform(-1, 1, (count, 10)).astype("float32")

    @tf.function(input_signature=[tf.TensorSpec([None, 10])])
    def there_and_back(rows):
        words = codec.encode(rows, STEP)
        return words, codec.decode(words, STEP)

    words, back = there_and_back(rows)
    assert words.shape == (count, width)
    np.testing.assert_allclose(back, rows, atol=tolerance)


def test_a_message_of_as_many_rows_is_small_enough():
    codec = RowCodec(None, 33)
    assert codec.rows_per_message * (4 * 33 + 4) <= MESSAGE_BYTES < 4 << 20


@pytest.mark.parametrize("value", ["topk:0.1", "sign", "powersgd:2"])
def test_what_leaves_out_parts_of_rows_is_refused(value):
    with pytest.raises(ValueError, match="`pull_compression` must keep .*Received: "):
        compressor_for_rows("pull_compression", value)


@pytest.mark.parametrize("argument", ["row_compression", "pull_compression"])
def test_what_is_unknown_is_told_what_serves_rows(argument):
    message = f"^`{argument}` must be None, \"bf16\", .* Received: {argument}='gzip'$"
    with pytest.raises(ValueError, match=message) as error:
        compressor_for_rows(argument, "gzip")
    assert "topk" not in str(error.value) and "powersgd" not in str(error.value)
