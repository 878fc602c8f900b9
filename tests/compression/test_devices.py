"""What is computed in another way where there are GPUs is the same; here all is on the CPU."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression.sparse import top_k
from tests.compression.common import at, use_gpus
from tests.support.tables import for_each

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
    """Makes a function's results without GPUs and as if there were one; returns both."""

    def call(make_function, *inputs):
        results = []
        for number in 0, 1:
            use_gpus(monkeypatch, number)
            function = make_function()
            results.append([tf.nest.map_structure(np.asarray, function(one)) for one in inputs])
        return results

    return call


def values(shape):
    """Values that all differ, some that are equal, and some that are not finite."""
    array = np.random.default_rng(0).normal(size=shape).astype("f4")
    wrong = array.copy()
    wrong.flat[[5, 33]] = np.nan, -np.inf
    return [tf.constant(one) for one in (array, np.round(array), wrong)]


@pytest.mark.extended
@for_each("shape", SHAPES)
@for_each("compressor", COMPRESSORS)
def test_words_and_what_they_are_decoded_to(compressor, shape, on_both):
    def make():
        @tf.function(autograph=False)
        def there_and_back(tensor):
            payload, _ = compressor.encode(tensor, (), at(1))
            words = compression.pack(payload)
            arrived = compression.unpack(words, payload)
            both = [tf.concat([part] * 2, 0) for part in arrived]
            total = compressor.add_rows(both, shape, at(1)) if compressor.has_sum_decode else ()
            decoded = compressor.decode(arrived, shape, "float32", 1)
            return tf.bitcast(words, tf.uint8), decoded, total

        return there_and_back

    processor, gpu = on_both(make, *values(shape))
    tf.nest.map_structure(np.testing.assert_array_equal, processor, gpu)


@pytest.mark.extended
def test_the_largest_are_the_same_ones(on_both):
    def sparse(zeros):
        rng = np.random.default_rng(0)
        array = rng.integers(-50, 50, [1, 300_007]).astype("f4")
        array[rng.random(array.shape) < zeros] = 0
        return tf.constant(array)

    make = functools.partial(tf.function, lambda matrix: top_k(matrix, 3000))
    processor, gpu = on_both(make, *map(sparse, [0.0, 0.995, 1.0]))
    tf.nest.map_structure(np.testing.assert_array_equal, processor, gpu)


def test_rows_of_unknown_number(on_both):
    compressor = compression.Sign(error_feedback=False)

    def make():
        @tf.function(input_signature=[tf.TensorSpec([None, 70])], autograph=False)
        def there_and_back(rows):
            payload = (*compressor.encode_rows(rows, at(0)), tf.range(tf.shape(rows)[0]))
            words = compression.pack(payload, tf.shape(rows)[0])
            *arrived, indices = compression.unpack(words, payload, tf.shape(words)[0])
            return compressor.decode_rows(tuple(arrived), (70,), "float32", at(0)), indices

        return there_and_back

    processor, gpu = on_both(make, values((5, 70))[0])
    tf.nest.map_structure(np.testing.assert_array_equal, processor, gpu)
