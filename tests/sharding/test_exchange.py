"""Compressed parts: what a step leaves out of sums or new values, later ones make up for."""

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce import shard_option
from keras_psplus.all_reduce.collectives.hop import Hop, Route
from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
from keras_psplus.sharding.exchange import PartExchange
from keras_psplus.sharding.places import Place
from keras_psplus.sharding.variable import ParameterPart
from tests.sharding.test_places import Alone
from tests.support.tables import for_each

PLACE = Place.of_parts((2, 3), 2)


def exchange_of(given):
    gradients, weights = shard_option.compressors(given, "optimizer")
    compressors = compression.with_error_feedback(compression.get(gradients)), weights
    route = Route(Hop(Alone(), range(2), 0))
    return PartExchange(route, 1 << 20, compressors, ReplicaStates("CPU:0"))


def test_small_gradients_beside_large_ones_arrive_in_time():
    exchange, total = exchange_of("int8"), np.zeros((1, 3))
    variable = keras.Variable(np.zeros((2, 3), "float32"))
    gradient = tf.constant([[1.0, 1e-3, -1e-3], [0.0, 0.0, 0.0]])
    for step in range(100):
        (part,) = exchange.scatter(
            [gradient], [variable], [PLACE.cut], [0], tf.constant(step, tf.int64)
        )
        total += part.numpy()
    np.testing.assert_allclose(total, [[100.0, 0.1, -0.1]], atol=1 / 127)
    (traffic,) = exchange.traffic.traffic()
    # Three bytes and a scale for the other worker at each step; six floats by themselves.
    assert (traffic.wire_bytes, traffic.logical_bytes) == (100 * 7, 100 * 24)
    assert "Int8" in traffic.compressor


@for_each("name, error", [("fp16", 3e-8), ("bf16", 1e-9), ("int8", 1e-9)])
def test_small_changes_of_weights_arrive_in_time(name, error):
    exchange = exchange_of({"weights": name})
    variable = keras.Variable(np.zeros((2, 3), "float32"))
    for step in range(100):
        part = ParameterPart(variable, PLACE, 0)
        part.assign_add(tf.constant([[1e-9, 0.0, -2e-9]]))
        exchange.gather([part], [0], tf.constant(step, tf.int64))
    # The same twice: the fake launcher has every worker send what this one does.
    np.testing.assert_allclose(variable.numpy(), 2 * [[1e-7, 0.0, -2e-7]], atol=error)


class Doubling:
    """Collectives between two groups, of which the other has sent the same."""

    _group_size = 2
    all_reduce = staticmethod(lambda tensor: 2 * tensor)


def test_sums_of_groups_are_summed():
    states = ReplicaStates("CPU:0")
    route, groups = Route(Hop(Alone(), range(2), 0)), Hop(Doubling(), (0, 2), 0)
    exchange = PartExchange(route, 1 << 20, (None, None), states, groups)
    variable, gradient = (
        keras.Variable(np.zeros((2, 3), "float32")),
        tf.reshape(tf.range(6.0), [2, 3]),
    )
    (part,) = exchange.scatter([gradient], [variable], [PLACE.cut], [0], tf.constant(0, tf.int64))
    np.testing.assert_array_equal(part, [[0.0, 2.0, 4.0]])
    (traffic,) = exchange.traffic.traffic()
    # Three floats for the other of the group, as many in a ring of two groups.
    assert (traffic.wire_bytes, traffic.between_groups_bytes) == (24, 12)


def test_values_that_layers_compute_with_have_no_residual():
    _, weights = shard_option.compressors({"weights": {"*kernel": "int8"}}, "all")
    chosen = weights.for_variable("dense/kernel", (64, 64), "float32")
    assert isinstance(chosen, compression.Int8)
    assert weights.for_variable("dense/bias", (64,), "float32") is None
