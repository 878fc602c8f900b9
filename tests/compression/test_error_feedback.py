import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import FEW, at, round_trip
from tests.support.tables import for_each
from tests.support.tiers import extended

# What these send is either 0 or so near (within a factor of two) to what was there that float32
# subtracts them without rounding (Sterbenz's lemma); so nothing is lost, to the last bit.
EXACT = [
    compression.Int8(),
    compression.TopK(0.01, warmup_epochs=3, steps_per_epoch=2),
    *extended(compression.Cast("bfloat16"), compression.RandomK(0.1)),
]
# These send magnitudes that are others' as well, and the difference is rounded.
ROUNDED = [
    compression.Sign(block_size=32),
    compression.PowerSGD(4, start_step=4),
]
SHAPE = [80, 60]


def steps_of(feedback, steps=8):
    """Yields what was to be sent in each step, what was sent, and what is kept."""
    send = tf.function(lambda g, s, step: round_trip(feedback, g, s, step))
    state = feedback.init(SHAPE, tf.float32)
    # Gradients as a network's are: a drift and noise, of magnitudes that differ by element.
    rng = np.random.default_rng(0)
    scale, drift = 10.0 ** rng.uniform(-3, 0, SHAPE), rng.normal(size=SHAPE)
    for step in range(steps):
        gradient = (scale * (0.1 * drift + rng.normal(size=SHAPE))).astype("f4")
        total = feedback.add(tf.constant(gradient), state).numpy()
        decoded, state = send(gradient, state, at(step))
        yield total, decoded.numpy(), state["residual"].numpy()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("inner", EXACT, ids=repr)
def test_nothing_is_lost_to_the_last_bit(inner, momentum):
    for total, decoded, residual in steps_of(compression.ErrorFeedback(inner, momentum=momentum)):
        np.testing.assert_array_equal(decoded + residual, total)
        assert np.any(residual)


@pytest.mark.parametrize("inner", ROUNDED, ids=repr)
def test_nothing_is_lost_but_what_float32_rounds(inner):
    compressed = 0
    for total, decoded, residual in steps_of(compression.ErrorFeedback(inner)):
        most = 2e-7 * np.abs(total).max()
        np.testing.assert_allclose(decoded + residual, total, rtol=0, atol=most)
        compressed += np.any(residual)
    assert compressed == 8 - inner.start_step


def test_what_arrives_sums_up_to_what_was_sent():
    inner = compression.Sign(block_size=64)
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


@for_each("inner", [one for one in FEW if not isinstance(one, compression.ErrorFeedback)])
def test_what_is_not_finite_leaves_the_state_as_it_was(inner):
    if not inner.takes_feedback:
        return
    feedback = compression.ErrorFeedback(inner, momentum=0.9)
    gradient = np.random.default_rng(0).normal(size=[30, 20]).astype("f4")
    _, before = round_trip(feedback, gradient)
    for bad in np.nan, np.inf:
        # More of them than top-k sends.
        wrong = gradient.copy()
        wrong[:, :7] = bad
        decoded, after = round_trip(feedback, wrong, before, step=4)
        assert not np.isfinite(decoded).all()
        tf.nest.map_structure(np.testing.assert_array_equal, after, before)


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


@for_each("times", [1, 2, 3, 9])
@for_each("momentum", [0.0, 0.5])
def test_tensors_are_multiplied_on_their_way_in(times, momentum):
    feedback = compression.ErrorFeedback(compression.TopK(0.5), momentum=momentum)
    tensor = tf.constant([1.0, -2.0, 3.0])
    state = tf.nest.map_structure(lambda s: s + 0.5, feedback.init([3], tf.float32))
    np.testing.assert_allclose(
        feedback.times(times).add(tensor, state), feedback.add(tensor * times, state), rtol=1e-6
    )
