"""What a parameter server makes of one step's gradients of one table."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.hybrid.server.shard import DynamicShard, TableShard
from keras_psplus.tables import keys
from keras_psplus.tables.row_optimizer import config_of

ROWS, DIM = 12, 3
# Sums of numbers of so many sizes have other bits in another order.
_RNG = np.random.default_rng(0)


def part(replica, number, last, ids):
    gradient = _RNG.normal(size=(len(ids), DIM)) * 10.0 ** _RNG.integers(-3, 4, (len(ids), 1))
    return replica, number, last, np.array(ids, "int32"), gradient.astype("float32")


ALL = range(ROWS)
ONE_EACH = [part(0, 0, True, ALL), part(1, 0, True, ALL[::-1]), part(2, 0, True, ALL[3:])]
SEVERAL = [
    part(0, 0, False, ALL[::2]),
    part(0, 1, True, ALL),
    part(1, 0, True, ALL[::-1]),
    part(2, 0, True, []),
]


def arrivals(parts):
    """All orders in which they may come: those of one replica in theirs."""
    for order in itertools.permutations(parts):
        if all(a[:2] < b[:2] for a, b in itertools.combinations(order, 2) if a[0] == b[0]):
            yield order


@pytest.mark.parametrize("parts", [ONE_EACH, SEVERAL], ids=["one_each", "several"])
def test_the_order_of_arrival_does_not_change_a_bit(parts):
    spec = {"key": 0, "name": "table", "rows": ROWS, "dim": DIM, "initializer": None}
    shard = TableShard(spec, 0, 1, None, None, replicas=3, sync=True)
    shard.set_optimizer(config_of(keras.optimizers.SGD(1.0), None, None, None), 1, 1)
    push, numbers = shard.methods()["push1"], tf.constant([1.0])
    # One process sums them replica by replica.
    total = np.zeros((ROWS, DIM), "float32")
    for _, _, _, ids, gradient in sorted(parts, key=lambda part: part[:2]):
        for i, row in zip(ids, gradient):
            total[i] += row
    orders = list(arrivals(parts))
    assert len(orders) == {3: 6, 4: 12}[len(parts)]
    for step, order in enumerate(orders):
        shard.weights.assign(tf.zeros([ROWS, DIM]))
        for replica, number, last, ids, gradient in order:
            assert int(shard.version) == step
            header = tf.constant([replica, step, number, last, 0, step], tf.int64)
            push(header, numbers, ids, gradient)
        np.testing.assert_array_equal(shard.weights, -total)
    assert int(shard.version) == len(orders)


@pytest.mark.parametrize("sync, expected", [(True, 0), (False, -3)])
def test_a_sum_or_each_push_is_regularized_clipped_and_decays(sync, expected):
    spec = {"key": 0, "name": "table", "rows": 1, "dim": 1, "initializer": None}
    shard = TableShard(spec, 0, 1, None, None, replicas=2, sync=sync)
    shard.weights.assign([[8.0]])
    optimizer, regularizer = keras.optimizers.SGD(1.0, clipvalue=4.0), keras.regularizers.L2(0.125)
    shard.set_optimizer(config_of(optimizer, 0.5, None, regularizer), 1, 1)
    push = shard.methods()["push1"]
    for replica in range(2):
        header = tf.constant([replica, 0, 0, 1, 0, 0], tf.int64)
        push(header, tf.constant([1.0]), tf.constant([0]), tf.constant([[3.0]]))
    # 8 / 2 - min(4, 6 + 8 / 4) = 0; or 8 / 2 - min(4, 3 + 8 / 4) = 0, and 0 / 2 - min(4, 3) = -3.
    assert shard.weights.numpy() == [[expected]]


def test_keys_that_are_inserted_begin_with_the_slots_of_the_last_optimizer():
    initializer = keys.check_initializer("ones")
    spec = {"key": 0, "name": "table", "dim": DIM, "initializer": initializer, "default": "zeros"}
    spec |= {"admit": None, "expire": []}
    shard = DynamicShard(spec, 0, 1, None, None, replicas=1, sync=False)
    # As a server has it, which serves a table before its optimizer is known.
    shard.methods()["insert"].get_concrete_function()
    for number in (1, 2):
        optimizer = keras.optimizers.Adagrad(initial_accumulator_value=number)
        shard.set_optimizer(config_of(optimizer, None, None, None), number, number)
        entries = tf.constant([[10 * number, 1, 1, 1], [10 * number + 1, 1, 1, 1]], tf.int64)
        methods = shard.methods()
        methods["insert"](entries)
        slot = methods[f"read{number}"](0, 2 * number).numpy()
        np.testing.assert_array_equal(slot, np.full([2 * number, DIM], number, "float32"))
