"""Two simulated workers learn the digits: each compressor comes close to exact gradients."""

import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import at

DIGITS = pathlib.Path(__file__).parents[2] / "examples" / "digits.npz"
SIZES = [64, 96, 10]
BATCH, STEPS = 128, 250


@functools.cache
def digits():
    data = np.load(DIGITS)
    x, y = (data["x"] / 16).astype("f4"), data["y"].astype("i4")
    order = np.random.default_rng(0).permutation(len(x))
    return (x[order[:1400]], y[order[:1400]]), (x[order[1400:]], y[order[1400:]])


def average(compressor, tensors, states, step):
    """What a strategy does with one variable's gradients, one of each worker."""
    if not compressor.reducible:
        sent, states = zip(*[compressor.encode(t, s, step) for t, s in zip(tensors, states)])
        decoded = [compressor.decode(p, tensors[0].shape, tf.float32, step) for p in sent]
        return tf.add_n(decoded) / len(decoded), states
    running = [compressor.exchange(t, s, step) for t, s in zip(tensors, states)]
    means = None
    while True:
        asked, results = [], []
        for generator in running:
            try:
                asked.append(generator.send(means))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            return results[0][0], [state for _, _, state in results]
        means = [tf.add_n(each) / len(each) for each in zip(*asked)]


def accuracy(compressor, rate=0.5, momentum=0.0):
    (x, y), (test_x, test_y) = digits()
    init = tf.random.Generator.from_seed(1)
    variables = []
    for fan_in, fan_out in zip(SIZES, SIZES[1:]):
        variables += [
            tf.Variable(init.normal([fan_in, fan_out]) * np.sqrt(2 / fan_in)),
            tf.Variable(tf.zeros([fan_out])),
        ]
    velocities = [tf.Variable(tf.zeros_like(v)) for v in variables]
    chosen = [compressor and compressor.for_variable("v", v.shape, v.dtype) for v in variables]
    states = [
        [tf.nest.map_structure(tf.Variable, c.init(v.shape, v.dtype)) for _ in range(2)]
        if c
        else ()
        for c, v in zip(chosen, variables)
    ]

    def logits(x):
        return tf.nn.relu(x @ variables[0] + variables[1]) @ variables[2] + variables[3]

    def gradients(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits(x))
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, variables)

    @tf.function(autograph=False)
    def train(x, y, step):
        halves = zip(*[gradients(*half) for half in zip(tf.split(x, 2), tf.split(y, 2))])
        for i, pair in enumerate(halves):
            if chosen[i] is None:
                gradient = tf.add_n(pair) / 2
            else:
                gradient, new = average(chosen[i], pair, states[i], step)
                tf.nest.map_structure(lambda v, n: v.assign(n), states[i], list(new))
            velocities[i].assign(momentum * velocities[i] + gradient)
            variables[i].assign_sub(rate * velocities[i])

    rng = np.random.default_rng(2)
    for step in range(STEPS):
        batch = rng.choice(len(x), BATCH, replace=False)
        train(x[batch], y[batch], at(step))
    return float(np.mean(np.argmax(logits(test_x), -1) == test_y))


@functools.cache
def exact(rate, momentum):
    return accuracy(None, rate, momentum)


@pytest.mark.parametrize(
    "compressor", [compression.Sign(), compression.PowerSGD(1, start_step=20)], ids=repr
)
def test_accuracy_is_within_two_points(compressor):
    reached = accuracy(compression.with_error_feedback(compressor))
    assert reached > exact(0.5, 0.0) - 0.02 > 0.9


def test_momentum_correction_replaces_the_optimizers_momentum():
    topk = compression.TopK(0.01, momentum_correction=0.9)
    reached = accuracy(compression.with_error_feedback(topk), rate=0.05)
    assert reached > exact(0.05, 0.9) - 0.02 > 0.9
