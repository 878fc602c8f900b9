"""What is computed in another way where there are GPUs is the same; here all is on the CPU."""

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression.sparse.top_k import top_k
from tests.compression.common import at

# One of several segments and thresholds, and one of a few words.
SHAPES = [(700, 431), (9, 7)]
COMPRESSORS = [
    compression.Sign(),
    compression.Sign(block_size=32),
    compression.TopK(0.01),
    compression.TopK(0.2),
    compression.TopK(0.1, warmup_epochs=2, steps_per_epoch=3),
    compression.RandomK(0.01),
    compression.Int8(),
    compression.Cast("float16"),
]


@pytest.fixture
def on_both(monkeypatch):
    """Calls a function without GPUs and as if there were one; returns both results."""

    def call(function):
        results = []
        for devices in [], [tf.config.LogicalDevice("/device:GPU:0", "GPU")]:
            monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind, d=devices: d)
            results.append(tf.nest.map_structure(np.asarray, function()))
        return results

    return call


def values(shape, kind):
    rng = np.random.default_rng(0)
    array = rng.normal(size=shape).astype("f4")
    if kind == "equal ones":
        array = np.round(array)
    if kind == "not finite":
        array.flat[[5, 33]] = np.nan, -np.inf
    return tf.constant(array)


@pytest.mark.parametrize("kind", ["all differ", "equal ones", "not finite"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_words_and_what_they_are_decoded_to(compressor, shape, kind, on_both):
    tensor = values(shape, kind)

    def there_and_back():
        # Traced anew on each of the two.
        @tf.function(autograph=False)
        def run(tensor):
            payload, _ = compressor.encode(tensor, (), at(1))
            words = compression.pack(payload)
            arrived = compression.unpack(words, payload)
            both = [tf.concat([part] * 2, 0) for part in arrived]
            total = compressor.add_rows(both, shape, at(1)) if compressor.has_sum_decode else ()
            return (
                tf.bitcast(words, tf.uint8),
                compressor.decode(arrived, shape, "float32", 1),
                total,
            )

        return run(tensor)

    processor, gpu = on_both(there_and_back)
    tf.nest.map_structure(np.testing.assert_array_equal, processor, gpu)


@pytest.mark.parametrize("zeros", [0.0, 0.995, 1.0])
def test_the_largest_are_the_same_ones(zeros, on_both):
    rng = np.random.default_rng(0)
    array = rng.integers(-50, 50, [1, 300_007]).astype("f4")
    array[rng.random(array.shape) < zeros] = 0
    processor, gpu = on_both(lambda: tf.function(lambda m: top_k(m, 3000))(tf.constant(array)))
    tf.nest.map_structure(np.testing.assert_array_equal, processor, gpu)


@pytest.mark.parametrize("compressor", [compression.Sign(error_feedback=False)], ids=repr)
def test_rows_of_unknown_number(compressor, on_both):
    tensor = values((5, 70), "all differ")

    def there_and_back():
        @tf.function(input_signature=[tf.TensorSpec([None, 70])], autograph=False)
        def run(rows):
            payload = (*compressor.encode_rows(rows, at(0)), tf.range(tf.shape(rows)[0]))
            words = compression.pack(payload, tf.shape(rows)[0])
            *arrived, indices = compression.unpack(words, payload, tf.shape(words)[0])
            return compressor.decode_rows(tuple(arrived), (70,), "float32", at(0)), indices

        return run(tensor)

    processor, gpu = on_both(there_and_back)
    tf.nest.map_structure(np.testing.assert_array_equal, processor, gpu)
