import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus import compression
from keras_psplus.compression.low_rank import gram_schmidt
from tests.compression.common import few, round_trip, use_gpus
from tests.support.tables import for_each


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


@for_each("rank, ratio", [(1, 243), (2, 136), (4, 72)])
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


def test_states_start_alike_on_all_workers():
    first, second = (compression.PowerSGD(2).init([30, 30], tf.float32) for _ in range(2))
    np.testing.assert_array_equal(first["q"], second["q"])


@for_each("rank", [1, 4, 32])
@for_each("scale", [1e-5, 1.0, 1e4])
def test_gpus_compute_the_same_without_a_qr_decomposition(rank, scale, monkeypatch):
    powersgd = compression.PowerSGD(rank, min_compression_rate=0)
    steps = [scale * (matrix(70, 50, 45, i) + 1) for i in range(4)]
    results = []
    for number in 0, 1:
        use_gpus(monkeypatch, number)
        state, results = None, [*results, []]
        for step, array in enumerate(steps):
            decoded, state = round_trip(powersgd, array, state, step)
            results[-1].append(decoded / scale)
    np.testing.assert_allclose(results[1], results[0], atol=1e-4 * np.max(np.abs(results[0])))


def test_orthonormal_columns_span_those_of_a_matrix():
    rng = np.random.default_rng(0)
    # Nearly dependent ones, and of very different lengths.
    array = (rng.normal(size=[200, 6]) + 100) * np.logspace(-15, 15, 6)
    array = array.astype("f4")
    found = gram_schmidt(tf.constant(array)).numpy()
    np.testing.assert_allclose(found.T @ found, np.eye(6), atol=1e-5)
    normal = array / np.linalg.norm(array, axis=0)
    np.testing.assert_allclose(found @ (found.T @ normal), normal, atol=1e-5)


def test_zeros_stand_for_dependent_columns():
    a, b = matrix(100, 2, 2).T
    found = gram_schmidt(tf.stack([a, 0 * a, b, a + 3 * b], 1)).numpy()
    np.testing.assert_array_equal(found[:, [1, 3]], np.zeros([100, 2]))
    kept = found[:, [0, 2]]
    np.testing.assert_allclose(kept.T @ kept, np.eye(2), atol=1e-6)


def test_gpus_keep_all_columns_after_gradients_of_lower_rank(monkeypatch):
    use_gpus(monkeypatch, 1)
    powersgd = compression.PowerSGD(4, min_compression_rate=0)
    for lower in 0, 1, 3:
        decoded, state = round_trip(powersgd, matrix(40, 30, lower))
        np.testing.assert_allclose(decoded, matrix(40, 30, lower), atol=2e-3)
        again = matrix(40, 30, 4, seed=1)
        for step in 1, 2:
            decoded, state = round_trip(powersgd, again, state, step)
        np.testing.assert_allclose(decoded, again, atol=2e-3)
