"""What a step sends and what it keeps for the next are, together, what there was to send."""

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import at, round_trip

# What these send is either 0 or so near (within a factor of two) to what was there that float32
# subtracts them without rounding (Sterbenz's lemma); so nothing is lost, to the last bit.
EXACT = [
    compression.Cast("bfloat16"),
    compression.Cast("float16"),
    compression.Int8(),
    compression.Int8(block_size=32),
    compression.TopK(0.01),
    compression.TopK(0.01, warmup_epochs=3, steps_per_epoch=2),
    compression.RandomK(0.1),
]
# These send magnitudes that are others' as well, and the difference is rounded.
ROUNDED = [
    compression.Sign(),
    compression.Sign(block_size=32),
    compression.PowerSGD(1),
    compression.PowerSGD(4),
    compression.PowerSGD(4, start_step=4),
]
SHAPE = [80, 60]


def gradients(steps):
    """Gradients as a network's are: a drift and noise, of magnitudes that differ by element."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-3, 0, SHAPE)
    drift = rng.normal(size=SHAPE)
    for _ in range(steps):
        yield (scale * (0.1 * drift + rng.normal(size=SHAPE))).astype("f4")


def steps_of(feedback, steps=8):
    """Yields what was to be sent in each step, what was sent, and what is kept."""
    send = tf.function(lambda g, s, step: round_trip(feedback, g, s, step))
    state = feedback.init(SHAPE, tf.float32)
    for step, gradient in enumerate(gradients(steps)):
        total = feedback.add(tf.constant(gradient), state).numpy()
        decoded, state = send(gradient, state, at(step))
        yield total, decoded.numpy(), state["residual"].numpy()


@pytest.mark.parametrize("inner", EXACT, ids=repr)
def test_nothing_is_lost_to_the_last_bit(inner):
    for total, decoded, residual in steps_of(compression.ErrorFeedback(inner)):
        np.testing.assert_array_equal(decoded + residual, total)
        assert np.any(residual)


@pytest.mark.parametrize("inner", ROUNDED, ids=repr)
def test_nothing_is_lost_but_what_float32_rounds(inner):
    compressed = 0
    for total, decoded, residual in steps_of(compression.ErrorFeedback(inner)):
        np.testing.assert_allclose(
            decoded + residual, total, rtol=0, atol=2e-7 * np.abs(total).max()
        )
        compressed += np.any(residual)
    assert compressed == 8 - inner.start_step


@pytest.mark.parametrize("inner", EXACT, ids=repr)
def test_with_momentum_too(inner):
    feedback = compression.ErrorFeedback(inner, momentum=0.9)
    for total, decoded, residual in steps_of(feedback):
        np.testing.assert_array_equal(decoded + residual, total)
