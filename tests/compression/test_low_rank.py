import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus import compression
from tests.compression.common import few, round_trip


def matrix(rows, columns, rank, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=[rows, rank]) @ rng.normal(size=[rank, columns])).astype("f4")


@given(st.integers(2, 40), st.integers(2, 40), st.integers(1, 4), st.integers(0, 3), st.booleans())
@few
def test_matrices_of_no_higher_rank_are_exact(rows, columns, rank, lower, warm):
    powersgd = compression.PowerSGD(rank, warm_start=warm, min_compression_rate=0)
    array = matrix(rows, columns, max(1, rank - lower))
    decoded, state = round_trip(powersgd, array)
    np.testing.assert_allclose(decoded, array, atol=2e-3)
    # A lower rank than the compressor's must not cost it the other columns for good.
    again = matrix(rows, columns, rank, seed=1)
    for step in 1, 2:
        decoded, state = round_trip(powersgd, again, state, step)
    np.testing.assert_allclose(decoded, again, atol=2e-3)


def error(powersgd, array, steps):
    state = None
    for step in range(steps):
        decoded, state = round_trip(powersgd, array, state, step)
    return np.linalg.norm(decoded - array)


def test_a_warm_start_converges_to_the_best_approximation():
    array = matrix(60, 50, 12)
    singular = np.linalg.svd(array, compute_uv=False)
    best = np.sqrt(np.sum(singular[3:] ** 2))
    warm, cold = compression.PowerSGD(3), compression.PowerSGD(3, warm_start=False)
    assert error(warm, array, 40) < best * 1.01 < error(cold, array, 40)


def test_the_error_falls_with_rank_and_is_none_at_full_rank():
    array = np.random.default_rng(0).normal(size=[24, 30]).astype("f4")
    errors = [
        error(compression.PowerSGD(rank, min_compression_rate=0), array, 20)
        for rank in (1, 2, 4, 8, 16, 24)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_what_is_not_worth_it_is_sent_whole():
    powersgd = compression.PowerSGD(4)
    for shape in [(100,), (), (8, 8), (5, 0)]:
        array = np.random.default_rng(0).normal(size=shape).astype("f4")
        np.testing.assert_array_equal(round_trip(powersgd, array)[0], array)
        assert powersgd.for_variable("v", shape, "float32") is None
    assert powersgd.for_variable("v", [100, 100], "float32") is powersgd
    # 200 * 4 floats against 10,000.
    assert compression.PowerSGD(4, min_compression_rate=12).for_variable("v", [100, 100], "float32")
    assert not compression.PowerSGD(4, min_compression_rate=13).for_variable(
        "v", [100, 100], "float32"
    )


@pytest.mark.parametrize("rank, ratio", [(1, 243), (2, 136), (4, 72)])
def test_the_papers_ratios_for_resnet18(rank, ratio):
    """Table 11 of the paper: ResNet-18 for CIFAR-10, biases and normalisation sent whole."""
    kernels, channels = [(3, 3, 3, 64)], [64]
    for stage, out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            first = out // 2 if stage and not block else out
            kernels += [(3, 3, first, out), (3, 3, out, out)]
            channels += [out, out]
            if first != out:
                kernels.append((1, 1, first, out))
                channels.append(out)
    shapes = [*kernels, (512, 10), (10,), *[(c,) for c in channels for _ in range(2)]]
    powersgd = compression.PowerSGD(rank)
    sent = sum(powersgd.wire_bytes(shape, "float32") for shape in shapes)
    assert round(sum(4 * np.prod(shape) for shape in shapes) / sent) == ratio


def test_the_first_steps_are_sent_whole():
    powersgd = compression.PowerSGD(1, start_step=3)
    array = np.random.default_rng(0).normal(size=[20, 20]).astype("f4")
    decoded, state = round_trip(powersgd, array, step=2)
    np.testing.assert_array_equal(decoded, array)
    decoded, _ = round_trip(powersgd, array, state, step=3)
    assert np.linalg.matrix_rank(decoded) == 1
    assert powersgd.wire_bytes([20, 20], "float32", 2) == 1600
    assert powersgd.wire_bytes([20, 20], "float32", 3) == 160


def test_convolutions_are_matrices_of_their_last_axis():
    kernel = matrix(27, 40, 2).reshape([3, 3, 3, 40])
    decoded, _ = round_trip(compression.PowerSGD(2), kernel)
    np.testing.assert_allclose(decoded, kernel, atol=1e-4)


def test_options_are_checked():
    for rank in 0, -1, 1.5, "4":
        with pytest.raises(ValueError, match="`rank` must be an int from 1 up. Received: rank="):
            compression.PowerSGD(rank)
    with pytest.raises(ValueError, match="Received: min_compression_rate=-1"):
        compression.PowerSGD(1, min_compression_rate=-1)
    with pytest.raises(ValueError, match="Received: start_step=-1"):
        compression.PowerSGD(1, start_step=-1)


def test_states_start_alike_on_all_workers():
    first, second = (compression.PowerSGD(2).init([30, 30], tf.float32) for _ in range(2))
    np.testing.assert_array_equal(first["q"], second["q"])
