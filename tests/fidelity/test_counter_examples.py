"""Problems on which a compressor alone goes wrong, and with error feedback does not.

The one for signs (Karimireddy et al., 2019) is in `tests/compression/test_error_feedback.py`.
"""

import numpy as np
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import round_trip

RATE = 0.02


def descend(compressor, gradients_of, start, steps):
    """Gradient descent of several workers; returns the point after each step."""

    @tf.function(autograph=False)
    def run():
        def next_point(carried, step):
            x, states = carried
            sent, states = zip(
                *[
                    round_trip(compressor, gradient, state, step)
                    for gradient, state in zip(gradients_of(x), states)
                ]
            )
            return x - RATE * tf.add_n(sent) / len(sent), states

        x = tf.constant(start, tf.float32)
        states = tuple(compressor.init(x.shape, tf.float32) for _ in gradients_of(x))
        return tf.scan(next_point, tf.range(steps, dtype=tf.int64), (x, states))[0]

    return run().numpy()


def test_the_largest_alone_run_away_from_the_minimum_of_three_workers():
    """Example 1 of "On Biased Compression for Distributed Learning" (Beznosikov et al., 2020).

    Three convex functions `<a, x>^2 + |x|^2 / 4` have their minimum at 0. From (1, 1, 1) the
    largest element of each one's gradient points away from it, and it grows without end.
    """
    each_a = np.float32([[-3, 2, 2], [2, -3, 2], [2, 2, -3]])

    def gradients(x):
        return [2 * tf.reduce_sum(a * x) * a + x / 2 for a in each_a]

    top1 = compression.TopK(1 / 3)
    alone = descend(top1, gradients, [1, 1, 1], 200)
    # Each step multiplies by 1 + 11/6 of the rate.
    np.testing.assert_allclose(alone[-1], [(1 + 11 / 6 * RATE) ** 200] * 3, rtol=1e-3)
    corrected = descend(compression.ErrorFeedback(top1), gradients, [1, 1, 1], 1000)
    assert np.abs(corrected[-1]).max() < 0.01


def test_the_largest_alone_never_see_what_the_workers_agree_on():
    """Two workers pull one way together, and more strongly to opposite sides of each other."""

    def gradients(x):
        return [tf.stack([x[0], 10.0]), tf.stack([x[0], -10.0])]

    top1 = compression.TopK(0.5)
    alone = descend(top1, gradients, [1, 0], 500)
    np.testing.assert_array_equal(alone[-1], [1, 0])
    corrected = descend(compression.ErrorFeedback(top1), gradients, [1, 0], 2000)
    assert abs(corrected[-500:, 0].mean()) < 0.05


def test_one_direction_alone_leaves_the_others_for_good():
    """Rank 1 without error feedback sends a gradient's strongest direction, and no other ever."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=[40, 2]))[0] for _ in range(2))
    strengths = [2.0, 1.0]
    gradient = (left * strengths @ right.T).astype("f4")

    def parts_that_arrive(compressor, steps=60):
        points = descend(compressor, lambda x: [gradient], np.zeros([40, 40]), steps)
        return np.diag(left.T @ (-points[-1] / RATE / steps) @ right) / strengths

    powersgd = compression.PowerSGD(1)
    strong, weak = parts_that_arrive(powersgd)
    assert strong > 0.95 and weak < 0.1
    strong, weak = parts_that_arrive(compression.ErrorFeedback(powersgd))
    assert strong > 0.9 and weak > 0.9
