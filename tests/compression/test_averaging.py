import numpy as np
import tensorflow as tf

from keras_psplus import compression
from tests.compression.common import REDUCIBLE, at, on_workers
from tests.support.tables import for_each

WORKERS = 3


def gradients(step):
    shape = [WORKERS, 40, 30]
    return tf.random.stateless_normal(shape, [step, 0]) + tf.random.stateless_normal(
        shape[1:], [1, 1]
    )


@for_each("compressor", REDUCIBLE)
def test_the_mean_is_the_same_on_all_workers(compressor):
    states = [compressor.init([40, 30], tf.float32)] * WORKERS
    arrived, sent = 0, 0
    for step in range(6):
        tensors = gradients(step)

        def work(worker, all_mean, step=step, tensors=tensors, states=states):
            return compressor.mean(tensors[worker], states[worker], at(step), all_mean)

        means, owns, states = zip(*on_workers(WORKERS, work))
        for mean in means[1:]:
            np.testing.assert_array_equal(mean, means[0])
        # What workers hold to be sent is, between them, what has arrived.
        np.testing.assert_allclose(np.mean(owns, 0), means[0], atol=0.03)
        arrived, sent = arrived + means[0], sent + tf.reduce_mean(tensors, 0)
    if isinstance(compressor, compression.ErrorFeedback):
        residual = np.mean([state["residual"] for state in states], 0)
        np.testing.assert_allclose(arrived + residual, sent, atol=1e-4)


@for_each("compressor", REDUCIBLE)
def test_one_workers_nan_reaches_all(compressor):
    tensors = gradients(0).numpy()
    tensors[1, 3, 4] = np.nan
    tensors = tf.constant(tensors)
    state = compressor.init([40, 30], tf.float32)

    def work(worker, all_mean):
        return compressor.mean(tensors[worker], state, at(0), all_mean)

    for mean, _, after in on_workers(WORKERS, work):
        assert not np.isfinite(mean).all()
        for tensor in tf.nest.flatten(after):
            assert np.isfinite(tensor).all()


def test_many_tensors_share_the_rounds():
    calls = []

    def all_mean(tensors):
        calls.append(len(tensors))
        return tensors

    feedback = compression.ErrorFeedback(compression.PowerSGD(2))
    compressors = [feedback, compression.Cast(), compression.NoCommunication(), feedback]
    tensors = [tf.random.normal([40, 30]) for _ in compressors]
    states = [c.init(t.shape, t.dtype) for c, t in zip(compressors, tensors)]
    means, owns, states = compression.exchange_means(compressors, tensors, states, at(0), all_mean)
    # Both factors of the matrices; the cast one goes with the first.
    assert calls == [3, 2]
    assert means[2] is tensors[2]
    assert [len(result) for result in (means, owns, states)] == [4, 4, 4]
    assert compression.exchange_means([], [], [], at(0), all_mean) == ([], [], [])


def test_the_first_steps_are_averaged_whole():
    shapes = []

    def all_mean(tensors):
        shapes.append([tuple(t.shape) for t in tensors])
        return tensors

    compressors = [compression.PowerSGD(2, start_step=5), compression.PowerSGD(2)]
    tensors = [tf.random.normal([40, 30])] * 2
    states = [c.init(t.shape, t.dtype) for c, t in zip(compressors, tensors)]

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def average(step):
        return compression.exchange_means(compressors, tensors, states, step, all_mean)[0]

    np.testing.assert_array_equal(average(at(4))[0], tensors[0])
    assert np.linalg.matrix_rank(average(at(5))[0]) == 2
    assert np.linalg.matrix_rank(average(at(4))[1]) == 2
    # All shapes are static, and nothing travels whole that need not.
    assert sorted(shapes) == sorted([[(40, 30)], *[[(40, 2)], [(30, 2)]] * 2])
