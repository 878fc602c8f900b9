import numpy as np
import pytest

from keras_psplus import compression


@pytest.mark.parametrize("wrong", [True, "4", None, 4.0, [4]])
def test_what_is_no_int_is_refused_by_name(wrong):
    for make in (
        compression.PowerSGD,
        compression.Int8,
        compression.Sign,
        lambda n: compression.TopK(0.5, warmup_epochs=1, steps_per_epoch=n),
        lambda n: compression.ByVariable({}, min_size=n),
    ):
        with pytest.raises(ValueError, match="must be an int from .* Received: .*="):
            make(wrong)


@pytest.mark.parametrize("wrong", [True, "0.5", None, float("nan"), 1j])
def test_what_is_no_number_is_refused_by_name(wrong):
    for make in (
        compression.TopK,
        compression.RandomK,
        lambda n: compression.TopK(0.5, momentum_correction=n),
        lambda n: compression.ErrorFeedback(compression.Sign(), momentum=n),
        lambda n: compression.PowerSGD(1, min_compression_rate=n),
    ):
        with pytest.raises(ValueError, match="must be .* Received: .*="):
            make(wrong)


def test_numpy_numbers_are_taken():
    assert compression.PowerSGD(np.int64(4)).rank == 4
    assert compression.TopK(np.float32(0.5)).density == 0.5
    assert repr(compression.Int8(np.int32(8))).startswith("Int8(block_size=8")
