"""Compressors that all-reduce can and cannot serve."""

import numpy as np
import pytest
import tensorflow as tf

import keras_psplus
from keras_psplus import compression
from keras_psplus.all_reduce.reduction import compressors, row_routes
from keras_psplus.all_reduce.reduction.compressed import CompressedSum


class OnlyExchange(compression.Compressor):
    """Averages in a round of its own, with nothing to encode."""

    def __init__(self, reducible=True, is_linear=False):
        self.reducible, self.is_linear = reducible, is_linear

    def exchange(self, tensor, state, step):
        (mean,) = yield [tensor]
        return mean, tensor, state

    def wire_bytes(self, shape, dtype, step=None):
        return 4 * tf.TensorShape(shape).num_elements()


class Uncounted(compression.NoCommunication):
    wire_bytes = compression.Compressor.wire_bytes


class Undecoded(compression.Compressor):
    def encode(self, tensor, state, step):
        return (tensor,), state

    def for_variable(self, path, shape, dtype):
        return self


class Chooser(compression.Compressor):
    """Nothing but a choice of its own."""

    def __init__(self, chosen):
        self.chosen = chosen

    def for_variable(self, path, shape, dtype):
        return self.chosen


class Alone:
    """What a launcher does for a single replica."""

    _device = "CPU:0"
    all_reduce = all_to_all = gather = staticmethod(tf.identity)


def summed(compressor):
    """A gradient, as it comes back from the one replica that there is."""
    variable = tf.Variable(tf.zeros([40, 2]))
    variable.path = "kernel"
    add_up = CompressedSum(Alone(), 0, 1, compressor, bucket_bytes=4000, timed=False)
    gradient = tf.reshape(tf.range(80.0), [40, 2])
    step = tf.constant(0, tf.int64)
    return tf.function(lambda: add_up([gradient], [variable], step)[0], autograph=False)()


@pytest.mark.parametrize(
    "unfit, method",
    [
        (compression.Compressor(), "encode"),
        (OnlyExchange(reducible=False), "encode"),
        (OnlyExchange(is_linear=True), "encode"),
        ({"*": OnlyExchange(reducible=False)}, "encode"),
        (compression.ErrorFeedback(OnlyExchange(reducible=False)), "encode"),
        (Undecoded(), "decode"),
        (Uncounted(), "wire_bytes"),
    ],
    ids=repr,
)
def test_what_lacks_a_method_is_refused_before_anything_starts(unfit, method):
    message = f"`compression` must have .* Received: compression=.*, without `{method}`"
    with pytest.raises(ValueError, match=message):
        keras_psplus.MultiWorkerMirroredStrategy(compression=unfit)


def test_unbiased_scaling_with_error_feedback_is_refused_before_anything_starts():
    class Asks(compression.RandomK):
        def __init__(self):
            super().__init__(0.1, unbiased=True)
            self.error_feedback = True

    with pytest.raises(ValueError, match="diverge.* Received: inner="):
        keras_psplus.MultiWorkerMirroredStrategy(compression=Asks())


@pytest.mark.parametrize(
    "fit",
    [
        OnlyExchange(),
        compression.ErrorFeedback(OnlyExchange(is_linear=True)),
        compression.NoCommunication(),
        compression.PowerSGD(1),
        compression.RandomK(0.1, unbiased=True),
        Chooser(compression.Sign()),
        {"*/kernel": "int8", "*": OnlyExchange()},
    ],
    ids=repr,
)
def test_what_has_what_its_way_needs_is_taken(fit):
    assert compressors.compressor_of(fit) is not None


@pytest.mark.parametrize(
    "fit",
    [
        OnlyExchange(),
        compression.ErrorFeedback(OnlyExchange(is_linear=True)),
        Chooser(OnlyExchange()),
    ],
    ids=repr,
)
def test_rounds_alone_are_enough_for_a_sum(fit):
    np.testing.assert_array_equal(summed(fit), np.arange(80.0).reshape(40, 2))


def test_what_a_compressor_chooses_is_checked_when_it_does():
    with pytest.raises(ValueError, match="Received: compression=.*, without `encode`"):
        summed(Chooser(OnlyExchange(reducible=False)))


def test_pieces_of_what_takes_no_feedback_are_summed():
    class Unbiased(compression.Int8):
        takes_feedback = False

    tensor = tf.constant([1.0, -127.0, 3.0])
    unbiased = Unbiased(stochastic=True)
    (total,), _, _ = row_routes.split(
        Alone(), 0, 1, unbiased, [tensor], (), tf.constant(0, tf.int64)
    )
    np.testing.assert_allclose(total, tensor, atol=1e-4)
