import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from keras_psplus import compression
from tests.compression.common import arrays, at, few, round_trip

BIASED = [
    compression.Cast("float16"),
    compression.Int8(),
    compression.Sign(block_size=64),
    compression.TopK(0.1),
    compression.RandomK(0.1),
    compression.PowerSGD(2),
]
each = pytest.mark.parametrize("inner", BIASED, ids=repr)


@each
def test_what_arrives_sums_up_to_what_was_sent(inner):
    feedback = compression.ErrorFeedback(inner)
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=[30, 20]).astype("f4")
    state, arrived, sent = feedback.init(gradient.shape, "float32"), 0, 0
    step_of = tf.function(lambda g, s, step: round_trip(feedback, g, s, step))
    for step in range(200):
        now = (gradient + 0.3 * rng.normal(size=gradient.shape)).astype("f4")
        decoded, state = step_of(now, state, at(step))
        arrived, sent = arrived + decoded, sent + now
    np.testing.assert_allclose(arrived + state["residual"], sent, atol=2e-3)
    mean_error = np.linalg.norm(arrived - sent) / np.linalg.norm(sent)
    assert mean_error < 0.25
    one_shot, _ = round_trip(inner, gradient)
    assert mean_error <= np.linalg.norm(one_shot - gradient) / np.linalg.norm(gradient) + 1e-6


@given(arrays())
@few
def test_what_topk_sends_and_keeps_is_the_gradient_to_the_last_bit(array):
    feedback = compression.ErrorFeedback(compression.TopK(0.1))
    decoded, state = round_trip(feedback, array)
    np.testing.assert_array_equal(decoded + state["residual"], array)


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_leaves_the_state_as_it_was(inner, bad):
    feedback = compression.ErrorFeedback(inner, momentum=0.9)
    gradient = np.random.default_rng(0).normal(size=[30, 20]).astype("f4")
    _, before = round_trip(feedback, gradient)
    # More of them than top-k sends.
    gradient[:, :7] = bad
    decoded, after = round_trip(feedback, gradient, before, step=1)
    assert not np.isfinite(decoded).all()
    for old, new in zip(tf.nest.flatten(before), tf.nest.flatten(after)):
        np.testing.assert_array_equal(old, new)


def test_float16_gradients_keep_a_float32_residual():
    feedback = compression.ErrorFeedback(compression.TopK(0.5))
    gradient = tf.constant([1.0, 1e-4], tf.float16)
    state = feedback.init([2], tf.float16)
    for _ in range(1000):
        total = feedback.add(gradient, state)
        own = tf.constant([1.0, 0.0], tf.float16)
        state = feedback.keep(gradient, total, (own, None), own, (), state)
    assert state["residual"].dtype == tf.float32
    # In float16 the sum would have stopped growing long before.
    np.testing.assert_allclose(state["residual"][1], 1000 * float(gradient[1]), rtol=1e-3)
    large = tf.constant([6e4, 6e4], tf.float16)
    for step in range(3):
        decoded, state = round_trip(feedback, large, state, step)
        assert np.isfinite(decoded).all() and decoded.dtype == tf.float16


def test_momentum_is_corrected_and_masked():
    """One step of Algorithm 1 of Deep Gradient Compression, by hand."""
    topk = compression.TopK(0.5, momentum_correction=0.5)
    feedback = compression.with_error_feedback(topk)
    assert (feedback.momentum, feedback.factor_masking) == (0.5, True)
    first, state = round_trip(feedback, [4.0, 1.0])
    np.testing.assert_array_equal(first, [4, 0])
    np.testing.assert_array_equal(state["momentum"], [0, 1])
    np.testing.assert_array_equal(state["residual"], [0, 1])
    second, state = round_trip(feedback, [1.0, 1.0], state)
    np.testing.assert_array_equal(second, [0, 2.5])
    np.testing.assert_array_equal(state["momentum"], [1, 0])
    np.testing.assert_array_equal(state["residual"], [1, 0])


def test_signs_need_it_on_the_papers_counter_example():
    """Section 3, counter-example 2 of the EF-SignSGD paper: signs alone move along one line.

    The gradients of `eps |x1 + x2| + |x1 - x2|` are all but opposite, so that signs never change
    the sum of the two.
    """

    def run(compressor):
        x, state = np.float32([1.0, 1.0]), compressor.init([2], tf.float32)
        compress = tf.function(lambda g, s: round_trip(compressor, g, s))
        for step in range(600):
            gradient = np.float32([0.5, 0.5]) if x.sum() >= 0 else np.float32([-0.5, -0.5])
            gradient += [1, -1] if x[0] >= x[1] else [-1, 1]
            decoded, state = compress(gradient, state)
            x = x - 0.5 / np.sqrt(step + 10) * decoded.numpy()
        return 0.5 * abs(x.sum()) + abs(x[0] - x[1])

    assert run(compression.ErrorFeedback(compression.Sign())) < 0.2
    assert run(compression.Sign()) > 0.9


def test_who_gets_it_by_default():
    with_feedback = compression.with_error_feedback
    assert with_feedback(None) is None
    for inner in compression.Sign(), compression.TopK(0.1), compression.PowerSGD(1):
        assert with_feedback(inner).inner is inner
    for plain in (
        compression.Cast(),
        compression.NoCommunication(),
        compression.Int8(stochastic=True),
    ):
        assert with_feedback(plain) is plain
    off = compression.Sign(error_feedback=False)
    assert with_feedback(off) is off
    once = compression.ErrorFeedback(compression.Cast("bfloat16"))
    assert with_feedback(once) is once
    by_variable = with_feedback(
        compression.ByVariable({"*bias*": None, "*": off}, compression.Sign())
    )
    assert by_variable.patterns["*"] is off
    assert isinstance(by_variable.default, compression.ErrorFeedback)


def test_it_leaves_alone_what_the_inner_one_does():
    feedback = compression.ErrorFeedback(compression.PowerSGD(2))
    assert feedback.for_variable("bias", [100], "float32") is None
    assert isinstance(feedback.for_variable("w", [100, 100], "float32"), compression.ErrorFeedback)


@pytest.mark.parametrize(
    "inner",
    [
        None,
        "int8",
        compression.ErrorFeedback(compression.Cast()),
        compression.ByVariable({}),
        compression.RandomK(0.05, unbiased=True),
    ],
)
def test_other_inner_ones_are_refused(inner):
    with pytest.raises(ValueError, match="`inner` must be .* Received: inner="):
        compression.ErrorFeedback(inner)


def test_one_that_asks_for_it_but_diverges_is_refused():
    class Scaled(compression.Cast):
        error_feedback, takes_feedback = True, False

        def __init__(self):
            self.dtype = "float16"

    with pytest.raises(ValueError, match="diverge.* Received: inner=Scaled"):
        compression.with_error_feedback(Scaled())


def test_momentum_is_checked():
    with pytest.raises(ValueError, match="Received: momentum=1"):
        compression.ErrorFeedback(compression.Sign(), momentum=1)


@pytest.mark.parametrize("times", [1, 2, 3, 9])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_tensors_are_multiplied_on_their_way_in(times, momentum):
    feedback = compression.ErrorFeedback(compression.TopK(0.5), momentum=momentum)
    tensor = tf.constant([1.0, -2.0, 3.0])
    state = tf.nest.map_structure(lambda s: s + 0.5, feedback.init([3], tf.float32))
    np.testing.assert_allclose(
        feedback.times(times).add(tensor, state), feedback.add(tensor * times, state), rtol=1e-6
    )


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize(
    "inner",
    [compression.Int8(), compression.Sign(), compression.TopK(0.1), compression.PowerSGD(1)],
)
def test_a_state_outlives_what_is_not_finite(inner, wrong):
    feedback = compression.ErrorFeedback(inner)
    tensor = np.random.default_rng(0).normal(size=(40, 30)).astype("f4")
    _, state = feedback.encode(tf.constant(tensor), feedback.init([40, 30], tf.float32), 0)
    tensor[3, 4] = wrong
    payload, after = feedback.encode(tf.constant(tensor), state, 1)
    assert not np.isfinite(feedback.decode(payload, [40, 30], tf.float32, 1)).all()
    tf.nest.map_structure(np.testing.assert_array_equal, after, state)
