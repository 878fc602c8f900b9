"""What is no option of a compressor, and no tensor for one, is refused by name."""

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import at

# Each makes a compressor of the option that it is named after.
FLAGS = {
    "stochastic": [lambda flag: compression.Int8(stochastic=flag)],
    "warm_start": [lambda flag: compression.PowerSGD(2, warm_start=flag)],
    "unbiased": [lambda flag: compression.RandomK(0.1, unbiased=flag)],
    "factor_masking": [
        lambda flag: compression.TopK(0.1, factor_masking=flag),
        lambda flag: compression.ErrorFeedback(compression.Sign(), factor_masking=flag),
    ],
    "error_feedback": [
        lambda flag: compression.Cast(error_feedback=flag),
        lambda flag: compression.Int8(error_feedback=flag),
        lambda flag: compression.Sign(error_feedback=flag),
        lambda flag: compression.TopK(0.1, error_feedback=flag),
        lambda flag: compression.RandomK(0.1, error_feedback=flag),
        lambda flag: compression.PowerSGD(2, error_feedback=flag),
    ],
}
SEEDED = [
    lambda seed: compression.Int8(stochastic=True, seed=seed),
    lambda seed: compression.RandomK(0.1, seed=seed),
    lambda seed: compression.PowerSGD(2, seed=seed),
]
ONE_ROW = [compression.Cast(), compression.Int8(), compression.Sign(), compression.TopK(0.1)]


@pytest.mark.parametrize("name, make", [(n, make) for n in FLAGS for make in FLAGS[n]])
def test_flags_are_true_or_false(name, make):
    for wrong in "no", 1, 0.0, []:
        message = f"`{name}` must be True(,| or) False.*. Received: {name}="
        with pytest.raises(ValueError, match=message):
            make(wrong)
    assert getattr(make(np.bool_(True)), name) is True
    assert getattr(make(False), name) is False


def test_none_is_a_flag_only_where_it_is_the_default():
    assert compression.Int8(error_feedback=None).error_feedback
    assert not compression.RandomK(0.1, unbiased=True, error_feedback=None).error_feedback
    for make in lambda: compression.Sign(error_feedback=None), lambda: compression.Int8(8, None):
        with pytest.raises(ValueError, match="must be True or False. Received: .*=None"):
            make()


@pytest.mark.parametrize("make", SEEDED)
def test_seeds_are_ints_that_a_generator_takes(make):
    for wrong in "a", None, 1.5, True, 2**63, -(2**63) - 1:
        message = "`seed` must be an int that fits in 64 bits. Received: seed="
        with pytest.raises(ValueError, match=message):
            make(wrong)
    for seed in -(2**63), 2**63 - 1, np.int32(7):
        compressor = make(seed)
        tensor = tf.random.stateless_normal([40, 30], [1, 2])
        state = compressor.init([40, 30], tf.float32)
        payload, _ = compressor.encode(tensor, state, at(3))
        assert np.isfinite(compressor.decode(payload, [40, 30], tf.float32, at(3))).all()


@pytest.mark.parametrize("dtype", ["complex64", "int32"])
@pytest.mark.parametrize("compressor", [*ONE_ROW, compression.PowerSGD(1)], ids=repr)
def test_other_than_floating_tensors_are_refused(compressor, dtype):
    state = compressor.init([20, 20], tf.float32)
    with pytest.raises(ValueError, match=f"floating type.* Received: dtype={dtype}"):
        compressor.encode(tf.ones([20, 20], dtype), state, at(0))


@pytest.mark.parametrize("shape", [[None, 3], None])
@pytest.mark.parametrize("compressor", ONE_ROW, ids=repr)
def test_bytes_are_those_of_static_shapes(compressor, shape):
    for one in compressor, compression.ErrorFeedback(compressor):
        with pytest.raises(ValueError, match="static shape.* Received: shape="):
            one.wire_bytes(shape, "float32")


def test_bytes_of_low_ranks_are_those_of_static_shapes():
    with pytest.raises(ValueError, match=r"static shape.* Received: shape=\(None, 3\)"):
        compression.PowerSGD(1).wire_bytes([None, 3], "float32")


@pytest.mark.parametrize("compressor", ONE_ROW, ids=repr)
def test_tensors_have_static_shapes(compressor):
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def encode(tensor):
        return compressor.encode(tensor, (), at(0))

    with pytest.raises(ValueError, match=r"static shape.* Received: shape=\(None, 3\)"):
        encode.get_concrete_function()
