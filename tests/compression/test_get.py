import numpy as np
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import at, bytes_of, on_workers, round_trip
from tests.support.tables import for_each


@for_each(
    "name, kind, option",
    [
        ("bf16", compression.Cast, ("dtype", "bfloat16")),
        ("fp16", compression.Cast, ("dtype", "float16")),
        ("int8", compression.Int8, ("block_size", 256)),
        ("int8:128", compression.Int8, ("block_size", 128)),
        ("sign", compression.Sign, ("block_size", 1024)),
        ("topk:0.01", compression.TopK, ("density", 0.01)),
        ("randomk:0.1", compression.RandomK, ("density", 0.1)),
        ("powersgd:4", compression.PowerSGD, ("rank", 4)),
        ("factors", compression.SufficientFactors, ("dtype", None)),
        ("factors:bf16", compression.SufficientFactors, ("dtype", "bfloat16")),
        ("factors:fp16", compression.SufficientFactors, ("dtype", "float16")),
    ],
)
def test_short_names(name, kind, option):
    compressor = compression.get(name)
    assert type(compressor) is kind
    assert getattr(compressor, option[0]) == option[1]


def test_compressors_none_and_dicts():
    assert compression.get(None) is None
    int8 = compression.Int8()
    assert compression.get(int8) is int8
    by_variable = compression.get({"*kernel": "powersgd:2", "*": int8, "*bias": None})
    assert by_variable.for_variable("a/kernel", [100, 100], "float32").rank == 2


class Half(compression.Compressor):
    """The base class's example."""

    reducible = True

    def encode(self, tensor, state, step):
        return (tf.cast(tensor, tf.float16),), state

    def decode(self, payload, shape, dtype, step):
        return tf.reshape(tf.cast(payload[0], dtype), shape)

    def wire_bytes(self, shape, dtype, step=None):
        return 2 * tf.TensorShape(shape).num_elements()


def test_a_compressor_of_ones_own():
    half = compression.get(Half())
    tensor = tf.random.stateless_normal([7, 5], [1, 2])
    payload, _ = half.encode(tensor, half.init(tensor.shape, tensor.dtype), at(0))
    assert bytes_of(payload) == half.wire_bytes(tensor.shape, tensor.dtype)
    decoded, state = round_trip(compression.ErrorFeedback(half), tensor)
    np.testing.assert_allclose(decoded, tensor, rtol=1e-3)
    np.testing.assert_array_equal(decoded + state["residual"], tensor)
    values = tf.ones([3, 4])
    assert half.decode_rows(half.encode_rows(values, at(0)), [4], tf.float32, at(0)) is values
    for mean, _, _ in on_workers(
        2, lambda worker, all_mean: half.mean(tensor * worker, (), at(0), all_mean)
    ):
        np.testing.assert_allclose(mean, tensor / 2, rtol=1e-3)
    assert repr(half) == "Half()"


def test_no_communication():
    nothing = compression.NoCommunication()
    payload, _ = nothing.encode(tf.ones([3]), (), at(0))
    assert payload == () and not nothing.communicates
    assert nothing.wire_bytes([3], "float32") == nothing.row_bytes([3], "float32") == 0
    np.testing.assert_array_equal(nothing.decode(payload, [3], tf.float32, at(0)), [0, 0, 0])
    mean, own, _ = nothing.mean(tf.ones([3]), (), at(0), None)
    np.testing.assert_array_equal(mean, [1, 1, 1])
    np.testing.assert_array_equal(own, [1, 1, 1])
    assert nothing.encode_rows(tf.ones([2, 3]), at(0)) == ()
    assert nothing.decode_rows((), [3], tf.float32, at(0)).shape == (0, 3)
