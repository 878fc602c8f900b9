"""Arguments that all-reduce refuses, and compressors that it serves."""

import json

import numpy as np
import pytest
import tensorflow as tf

import keras_psplus
from keras_psplus import compression
from keras_psplus.all_reduce.collectives.hop import Hop
from keras_psplus.all_reduce.reducers import RingSum
from keras_psplus.all_reduce.reduction.methods import compressor_of
from tests.support.tables import for_each


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


def summed(compressor, values=None):
    """A gradient, as it comes back from the one replica that there is."""
    values = np.arange(80.0).reshape(40, 2) if values is None else values
    gradient = tf.constant(values, tf.float32)
    variable = tf.Variable(gradient)
    variable.path = "kernel"
    add_up = RingSum(Hop(Alone(), [0], 0), compressor, bucket_bytes=4000, timed=False)
    step = tf.constant(0, tf.int64)
    return tf.function(lambda: add_up([gradient], [variable], step)[0], autograph=False)()


class Biased(compression.RandomK):
    """Scaled up, with feedback of what is lost."""

    def __init__(self):
        super().__init__(0.1, unbiased=True)
        self.error_feedback = True


def without(method, *compressors):
    message = f"`compression` must have .* Received: compression=.*, without `{method}`"
    return [({"compression": one}, message) for one in compressors]


PAIRS = [[0, 1], [2, 3]]
NO_HOPS = '"within" and "between" are the hops of a topology'
NO_SHARES = "inside groups .* `supports_reduce_scatter`"
REFUSED = [
    *without("encode", compression.Compressor(), OnlyExchange(reducible=False)),
    *without("encode", OnlyExchange(is_linear=True), {"*": OnlyExchange(reducible=False)}),
    *without("encode", compression.ErrorFeedback(OnlyExchange(reducible=False))),
    *without("decode", Undecoded()),
    *without("wire_bytes", Uncounted()),
    ({"compression": Biased()}, "diverge.* Received: inner="),
    *(
        ({"compression": wrong}, "Received: ")
        for wrong in ("int7", "topk:2", "powersgd:0", "int8:0", 8, {"*": "gzip"})
    ),
    ({"compression": {"within": "bf16"}}, f"{NO_HOPS}.*topology="),
    ({"compression": {"between": "int8"}, "topology": "flat"}, f"{NO_HOPS}.*topology="),
    *(
        ({"compression": given, "topology": groups}, f"{message}.* Received: .*compression=")
        for given, groups, message in (
            ({"within": "topk:0.1"}, PAIRS, NO_SHARES),
            ({"within": {"*": "int8"}}, PAIRS, NO_SHARES),
            ({"within": "powersgd:2"}, "auto", NO_SHARES),
            ({"between": "int8", "*kernel": "bf16"}, PAIRS, "must have no other keys"),
            ({"between": "int9"}, PAIRS, "`compression` must be"),
            ("factors", PAIRS, "gathered by all workers"),
            ({"between": {"*kernel": "factors"}}, PAIRS, "gathered by all workers"),
            ("int8", [[0, 1, 2, 3]], 'no hop "between" .* without more than one group'),
            ({"within": "int8"}, [[0], [1], [2], [3]], 'no hop "within".* a group of several'),
        )
    ),
]
NO_GROUPS = [
    ([["worker-0", "worker-4"]], "worker-4' is none"),
    ([[0, 1], [2, 4]], "numbers from 0 to 3; 4 is none"),
    ([[0, 1], [2, True]], "True is none"),
    ([["worker-0", "worker-1"], ["worker-1", "worker-2", 3]], "worker-1 is there 2 times"),
    ([["worker-0", 0], ["worker-1", "worker-2", 3]], "worker-0 is there 2 times"),
    ([["worker-0", "worker-1"], ["worker-2"]], "worker-3 is in none"),
    ([["worker-0"]], "worker-1, worker-2, worker-3 are in none"),
    ([[0, 1, 2, 3], []], "each group of `topology` must have a worker"),
    ([["worker-0", 1, 2], [3]], "must be of one size: .*leave `topology` out for one ring"),
    ("ring", "`topology` must be None"),
    (["worker-0", "worker-1"], "`topology` must be None"),
    ([], "`topology` must be None"),
    (3, "`topology` must be None"),
]


@pytest.fixture
def four_workers(monkeypatch):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in range(2, 6)]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


@for_each("arguments, message", REFUSED)
def test_arguments_are_refused_before_anything_starts(arguments, message, four_workers):
    with pytest.raises(ValueError, match=message):
        keras_psplus.MultiWorkerMirroredStrategy(**arguments)


@for_each("topology, message", NO_GROUPS)
def test_groups_that_are_none_are_refused_before_anything_starts(topology, message, four_workers):
    for strategy in keras_psplus.MultiWorkerMirroredStrategy, keras_psplus.HybridStrategy:
        with pytest.raises(ValueError, match=f"{message}.* Received: topology="):
            strategy(topology=topology)


@for_each(
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
)
def test_what_has_what_its_way_needs_is_taken(fit):
    assert compressor_of(fit) is not None


@for_each(
    "fit",
    [
        OnlyExchange(),
        compression.ErrorFeedback(OnlyExchange(is_linear=True)),
        Chooser(OnlyExchange()),
    ],
)
def test_rounds_alone_are_enough_for_a_sum(fit):
    np.testing.assert_array_equal(summed(fit), np.arange(80.0).reshape(40, 2))


def test_what_a_compressor_chooses_is_checked_when_it_does():
    with pytest.raises(ValueError, match="Received: compression=.*, without `encode`"):
        summed(Chooser(OnlyExchange(reducible=False)))


def test_pieces_of_what_takes_no_feedback_are_summed():
    class Unbiased(compression.Int8):
        takes_feedback = False

    tensor = [[1.0, -127.0, 3.0]]
    np.testing.assert_allclose(summed(Unbiased(stochastic=True), tensor), tensor, atol=1e-4)
