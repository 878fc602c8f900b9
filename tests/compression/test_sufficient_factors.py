import tensorflow as tf

from keras_psplus import compression
from tests.support.tables import for_each


def test_bytes_of_factors_and_of_wholes():
    factors = compression.SufficientFactors()
    assert factors.factor_bytes([300, 41], rows=10) == 10 * 341 * 4
    assert factors.wire_bytes([300, 41], "float32") == 300 * 41 * 4
    halves = compression.SufficientFactors("float16")
    # In whole words.
    assert halves.factor_bytes([300, 41], rows=10) == 10 * (300 + 42) * 2
    assert halves.wire_bytes([300, 41], "float32") == 300 * 41 * 2
    assert int(halves.factor_bytes([300, 41], tf.constant(10))) == 10 * 342 * 2


@for_each("dtype", [None, "bfloat16"])
@for_each("replicas", [2, 5])
@for_each("rate", [0.5, 1, 3])
def test_the_most_rows_are_those_that_save_bytes(dtype, replicas, rate):
    factors = compression.SufficientFactors(dtype, min_compression_rate=rate)
    shape = (1000, 600)
    most = factors.most_rows(shape, replicas)
    of_a_ring = 2 * (replicas - 1) / replicas * factors.wire_bytes(shape, "float32")
    for rows, saves in ((most, True), (most + 1, False)):
        sent = (replicas - 1) * factors.factor_bytes(shape, rows)
        assert (sent * rate <= of_a_ring) == saves
    assert most > 0 and factors.most_rows((1000, 1), 2) <= 2


def test_it_leaves_vectors_alone():
    factors = compression.SufficientFactors()
    assert factors.for_variable("dense/bias", [100], "float32") is None
    assert factors.for_variable("dense/kernel", [100, 100], "float32") is factors
