import numpy as np
import tensorflow as tf

from keras_psplus import compression
from tests.support.tables import for_each

DTYPES = ["int8", "uint8", "uint16", "float16", "bfloat16", "int32", "float32", "int64", "float64"]


def bits(tensor):
    return tf.bitcast(tensor, tf.uint8).numpy() if tensor.dtype.size > 1 else tensor.numpy()


@for_each("rows", [1, 3])
def test_every_bit_arrives(rows):
    rng = np.random.default_rng(0)
    payload = []
    for dtype in map(tf.as_dtype, DTYPES):
        for size in 0, 1, 2, 3, 4, 9:
            raw = tf.constant(rng.integers(0, 256, [rows, size, dtype.size]), tf.uint8)
            if dtype.size == 1:
                raw = raw[..., 0]
            payload.append(tf.bitcast(raw, dtype) if dtype != tf.uint8 else raw)
    words = compression.pack(payload, rows)
    assert (words.dtype, words.shape[0]) == (tf.float32, rows)
    for sent, arrived in zip(payload, compression.unpack(words, payload, rows)):
        assert (sent.dtype, sent.shape) == (arrived.dtype, arrived.shape)
        np.testing.assert_array_equal(bits(sent), bits(arrived))


def test_scalars_unknown_sizes_and_nothing():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int8), tf.TensorSpec([], tf.int64)])
    def there_and_back(some, scalar):
        words = compression.pack((some, scalar))
        return words, compression.unpack(words, (some, scalar))

    words, (some, scalar) = there_and_back(tf.constant(range(5), tf.int8), tf.constant(7, tf.int64))
    assert words.shape == (1, 4)
    np.testing.assert_array_equal(some, range(5))
    assert scalar == 7
    assert compression.pack(()).shape == (1, 0)
    assert compression.unpack(compression.pack(()), ()) == ()


def test_no_more_than_three_bytes_are_added_to_each_tensor():
    for compressor in compression.Int8(), compression.Sign(), compression.TopK(0.1):
        payload, _ = compressor.encode(tf.ones([1001]), (), 0)
        words = compression.pack(payload)
        assert 0 <= 4 * words.shape[1] - compressor.wire_bytes([1001], "float32") <= 3
