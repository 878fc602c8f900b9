import inspect
import types

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.reducers import GradientReducer
from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
from keras_psplus.all_reduce.step.updating import Accumulators
from keras_psplus.all_reduce.topology.group_topology import compressors_per_hop
from keras_psplus.core.batch import losses
from keras_psplus.core.batch.batches import Batch
from keras_psplus.engine import Call
from tests.support.tables import for_each

ENGINE = types.SimpleNamespace(sums_eagerly=True, sum_parts=None)


class Barrier:
    def __init__(self):
        self.left = 0

    def token(self):
        return tf.constant(0.0)

    def release(self, total):
        self.left += 1


class Extended:
    """What a step asks of its strategy, for one replica of one."""

    _num_replicas_in_sync = 1

    def __init__(self, barrier):
        self.barrier = barrier
        self.sums = []

    def rank_in_context(self):
        return 0

    def sum_over_replicas(self, tensors):
        self.sums.append(len(tensors))
        return list(tensors)


@for_each("tensors", [[], [tf.constant(2.0)]])
def test_replicas_meet_at_the_fence_once_and_again_only_after_a_push(tensors):
    extended = Extended(Barrier())
    with MirroredReplicaStep(ENGINE, extended) as step:
        step.has_pushed = True
        assert [float(t) for t in step.synchronise(tensors=tensors)] == [float(t) for t in tensors]
        step.synchronise()
        assert extended.barrier.left == 1
        step.has_pushed = True
        step.synchronise()
        step.synchronise()
    assert extended.barrier.left == 2
    assert extended.sums == [len(tensors) + 1, 0, 1, 0]


def test_without_tables_nothing_is_added():
    extended = Extended(None)
    with MirroredReplicaStep(ENGINE, extended) as step:
        step.synchronise()
    assert extended.sums == [0]


@for_each("before, part", [(np.inf, 2.0), (1.0, np.inf), (np.inf, -np.inf)])
def test_an_infinite_total_is_that_of_one_process(before, part):
    total = tf.Variable(before)
    with MirroredReplicaStep(ENGINE, Extended(None)) as step:
        step.record_total(total)
        total.assign_add(part)
        (read,) = step.synchronise(reads=[(total, total.read_value())])
    np.testing.assert_equal([total.numpy(), read.numpy()], 2 * [before + part])


class OfRows(Extended):
    """One that knows how many rows its replica has, and compresses products by their factors."""

    reducers = types.SimpleNamespace(takes_products=True)

    def __init__(self):
        super().__init__(None)
        self.variables = {name: tf.Variable(1.0) for name in ("share", "global rows", "local rows")}

    def step_variable(self, name, on_host=False):
        return self.variables[name]


class Strategy:
    pass


@for_each("rank, left", [(0, 4.0), (1, 0.0)])
def test_a_sum_over_all_replicas_is_left_to_the_first(rank, left):
    strategy = Strategy()
    strategy.extended = types.SimpleNamespace(
        device_in_context=lambda: "CPU:0", rank_in_context=lambda: rank
    )
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer.build([keras.Variable(1.0)])
    (total,) = optimizer._accumulated_gradients
    accumulators = Accumulators(strategy, None)
    for value, expected in ((4.0, left), (3.0, 3.0)):
        # The second is the replica's own.
        total.assign(value)
        accumulators.begin_step(optimizer)
        assert float(total.numpy()) == expected
    accumulators.note_assigned([total])
    total.assign(4.0)
    accumulators.begin_step(optimizer)
    assert float(total.numpy()) == left


class OwnChoice(compression.Int8):
    def for_variable(self, path, shape, dtype):
        return compression.PowerSGD(1)


@for_each(
    "chosen, expected",
    [
        (None, False),
        ("int8", False),
        ("powersgd:2", True),
        ("factors", True),
        ({"*kernel": "powersgd:2", "*": "int8"}, True),
        (OwnChoice(), True),
    ],
)
def test_products_are_looked_for_where_a_compressor_may_take_them(chosen, expected):
    hops = compressors_per_hop(chosen, "flat")
    reducer = GradientReducer([], 0, 2, hops, 1, levels=None, state=None)
    assert reducer.takes_products is expected


def test_a_replica_counts_by_its_rows():
    batch = Batch(tf.ones([1, 1]), tf.constant(1), tf.constant(4))
    with MirroredReplicaStep(ENGINE, OfRows(), batch) as step:
        assert float(step.scale_by_batch_fraction(tf.constant(8.0))) == 2.0
        assert [float(count) for count in step.rows()] == [1.0, 4.0]
        weight, names = tf.Variable(3.0), ["target", "sources", "output_gradients"]
        # Another test may have had it replaced, which asks the step's engine.
        gradient = inspect.unwrap(tf.GradientTape.gradient)
        for seeds, expected in ((None, 1.5), ([tf.constant(2.0)], 12.0)):
            with tf.GradientTape() as tape:
                loss = weight**2
            kwargs = {} if seeds is None else {"output_gradients": seeds}
            call = Call(gradient, tape, ([loss], weight), kwargs, parameters=names)
            # Of the batch's mean, but for those that the script has begun with.
            assert float(losses.gradient(call)) == expected


@for_each("local_rows", [0, 1, 3])
def test_what_a_replica_without_rows_has_computed_is_left_out(local_rows):
    extended = OfRows()

    @tf.function(
        input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)], autograph=False
    )
    def run(x, rows):
        with MirroredReplicaStep(ENGINE, extended, Batch(x, rows, tf.constant(4))) as step:
            slices = tf.IndexedSlices(x, tf.range(tf.shape(x)[0]))
            product = tf.matmul(x, x, transpose_a=True)
            dense, none, slices, product = step.zero_if_empty(
                [tf.reduce_sum(x), None, slices, product]
            )
            assert none is None
            (total,) = step.sum_over_replicas([tf.reduce_sum(x)])
            return dense, slices.values, slices.indices, product, step.rows_if_any(x), total

    # Where there are no rows, that is the one which does not count.
    x = np.full([max(local_rows, 1), 2], 2.0 if local_rows else np.nan, "float32")
    own = x[:local_rows]
    expected = own.sum(), own, np.arange(local_rows), own.T @ own, own, own.sum()
    for found, value in zip(run(x, local_rows), expected, strict=True):
        np.testing.assert_array_equal(found, value)


def test_the_graph_may_know_that_there_are_rows():
    with MirroredReplicaStep(
        ENGINE, OfRows(), Batch(tf.ones([2, 1]), tf.constant(2), tf.constant(4))
    ) as step:
        assert not step.may_be_empty
        x = tf.ones([2, 1])
        assert step.rows_if_any(x) is x
        # As on the other replicas, which may know less.
        assert float(step.zero_if_empty([tf.constant(3.0)])[0]) == 3.0
        with tf.Graph().as_default():
            # It may be called in another step as well.
            assert step.may_be_empty
    with MirroredReplicaStep(
        ENGINE, OfRows(), Batch(tf.ones([1, 1]), tf.constant(0), tf.constant(4))
    ) as step:
        assert step.may_be_empty
