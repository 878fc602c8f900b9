from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.distribute import cross_device_utils

from keras_psplus import compression
from keras_psplus.all_reduce.collectives import hop, instance_keys, operations
from keras_psplus.all_reduce.collectives.hop import Hop, Joined
from keras_psplus.all_reduce.reducers import RingSum


@given(st.integers(0, 10_000_000))
def test_rows_are_padded_by_an_eighth_at_most(rows):
    padded, index = instance_keys.size_class_of(tf.constant(rows))
    assert rows <= int(padded) <= max(1, rows * 9 / 8)
    assert 0 <= int(index) < instance_keys.SIZE_CLASSES


class FakeLauncher:
    """Two replicas that hold the same: sums are twice the value."""

    _device = "CPU:0"

    def __init__(self):
        self.sizes = []

    def all_reduce(self, tensor):
        self.sizes.append(int(tf.size(tensor)))
        return tensor * 2

    def gather_rows(self, tensor):
        return tf.concat([tensor] * 2, 0), tf.fill([2], tf.shape(tensor)[0])


class Named(NamedTuple):
    path: str
    shape: tuple


def test_buckets_are_in_the_order_in_which_they_are_complete():
    items = ["a0", "a1", "a2", "b3", "c4", "b5", "c6"]
    found = hop.buckets(items, lambda item: item[0], lambda item: 1, 2)
    expected = [("a", ["a0", "a1"]), ("a", ["a2"]), ("b", ["b3", "b5"]), ("c", ["c4", "c6"])]
    assert found == expected


def test_large_items_are_alone_and_the_rest_comes_behind_them():
    items = ["a1", "a4", "a2", "b1", "a1", "a5", "b1"]
    found = hop.buckets(items, lambda item: item[0], lambda item: int(item[1]), 4)
    small = ("a", ["a1", "a2", "a1"])
    assert found == [("a", ["a4"]), small, ("a", ["a5"]), ("b", ["b1", "b1"])]
    found = hop.buckets(items[1:], lambda item: item[0], lambda item: int(item[1]), 4)
    assert found == [("a", ["a4"]), ("a", ["a5"]), ("a", ["a2", "a1"]), ("b", ["b1", "b1"])]


def test_a_bucket_waits_until_the_second_before_it_has_ended():
    variables = [Named(f"weight_{i}", tf.TensorShape([3])) for i in range(5)]
    launcher = FakeLauncher()
    launcher.all_reduce = tf.identity
    add_up = RingSum(Hop(launcher, range(2), 0), None, bucket_bytes=1, timed=False)

    @tf.function(autograph=False)
    def step(grads):
        totals = [one.op for one in add_up(grads, variables, tf.constant(0, tf.int64))]
        for i, op in enumerate(totals):
            waits_for = [other for other in totals if other in op.control_inputs]
            assert waits_for == totals[i + 2 : i + 3]
        return len(totals)

    assert step([tf.ones([3])] * 5) == 5


def total(launcher, grads, bucket_bytes=4 << 20):
    add_up = RingSum(Hop(launcher, range(2), 0), None, bucket_bytes)
    variables = [
        Named(f"v{i}", (5, 3) if isinstance(g, tf.IndexedSlices) else g.shape)
        for i, g in enumerate(grads)
    ]
    return add_up(grads, variables, 0), add_up.traffic_variables.traffic()


def test_buckets_go_from_the_last_gradient_back():
    launcher = FakeLauncher()
    grads = [tf.ones([10]) * i for i in range(5)]
    summed, _ = total(launcher, grads, bucket_bytes=80)
    assert launcher.sizes == [20, 20, 10]
    for i, tensor in enumerate(summed):
        np.testing.assert_array_equal(tensor, np.full(10, 2.0 * i))


def test_dtypes_and_slices_are_kept_apart():
    launcher = FakeLauncher()
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 1]), tf.constant([5, 3]))
    grads = [tf.ones([4]), slices, tf.ones([2, 2], tf.float16), tf.ones([])]
    summed, traffic = total(launcher, grads)
    assert sorted(launcher.sizes) == [4, 5]
    assert [g.dtype for g in summed] == [g.dtype for g in grads]
    assert [getattr(g, "shape", None) for g in summed if not isinstance(g, tf.IndexedSlices)] == [
        (4,),
        (2, 2),
        (),
    ]
    np.testing.assert_array_equal(summed[1].indices, [1, 1, 1, 1])
    np.testing.assert_array_equal(summed[1].values, np.ones([4, 3]))
    # Three numbers and an index in each of two rows.
    assert [entry.logical_bytes for entry in traffic] == [16, 32, 8, 4]
    assert [entry.compressed_bytes for entry in traffic] == [16, 32, 8, 4]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_any_bucket_size_gives_the_same(bucket_bytes):
    grads = [tf.random.normal([3, 2]), tf.random.normal([7])]
    summed, _ = total(FakeLauncher(), grads, bucket_bytes)
    for tensor, grad in zip(summed, grads):
        np.testing.assert_array_equal(tensor, grad * 2)


def test_rows_of_long_buckets_are_of_whole_blocks():
    int8 = compression.Int8(block_size=16)
    assert Joined([tf.zeros([100]), tf.zeros([20])], 3, int8.row_multiple).width == 40
    assert Joined([tf.zeros([3000])], 3, int8.row_multiple).width == 1008
    assert Joined([tf.zeros([3001])], 2, compression.RandomK(0.1).row_multiple).width == 1501


@given(st.integers(1, 5000), st.integers(1, 30_000), st.integers(1, 600))
def test_pieces_are_the_whole(elements, size, multiple):
    tensor = tf.range(elements, dtype=tf.float32)
    pieces = hop.pieces(tensor, size, multiple)
    np.testing.assert_array_equal(tf.concat(pieces, 0), tensor)
    assert len(pieces) <= min(8, max(1, 4 * elements // size))
    assert all(len(piece) % multiple == 0 and len(piece) for piece in pieces[:-1])


def test_little_that_is_sent_shares_messages():
    launcher = FakeLauncher()
    add_up = RingSum(Hop(launcher, range(2), 0), compression.PowerSGD(1), bucket_bytes=20_000)
    grads = [tf.ones([100, 100])] * 4
    add_up(grads, [Named(f"v{i}", (100, 100)) for i in range(4)], tf.constant(0, tf.int64))
    # Both factors of all four, though each gradient would fill a bucket.
    assert launcher.sizes == [400, 400]


def needed(op):
    """Names of the operations that have to be done before that one."""
    found, left = set(), [op]
    while left:
        op = left.pop()
        for other in [*op.control_inputs, *(tensor.op for tensor in op.inputs)]:
            if other.name not in found:
                found.add(other.name)
                left.append(other)
    return found


def waited_for(function):
    """By number, the collectives of a graph that each of them waits for."""
    collective = [op for op in function.graph.get_operations() if op.type.startswith("Collective")]
    numbers = {op.name: number for number, op in enumerate(collective)}
    return [sorted(numbers[name] for name in needed(op) if name in numbers) for op in collective]


def launcher_of_two(device, implementation="AUTO", key=1):
    return operations.Launcher(
        *(key, 2, cross_device_utils.CollectiveKeys(), device),
        tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation[implementation]
        ),
    )


LONG = tf.TensorSpec([1 << 20])


def test_collectives_wait_for_those_of_their_lane_only():
    launcher = launcher_of_two("/device:CPU:0")

    @tf.function(input_signature=[LONG], autograph=False)
    def step(tensor):
        sums = [launcher.all_reduce(tensor) for _ in range(6)]
        # Of other shapes and kinds, they wait for none of these.
        return sums, launcher.all_reduce(tensor[1:]), launcher.gather(tensor)

    expected = [[], [], [], [], [0], [1], [], []]
    assert waited_for(step.get_concrete_function()) == expected


@pytest.mark.parametrize("apart", [True, False])
def test_branches_apart_wait_for_each_other_only_if_they_share_a_name(apart):
    launcher = launcher_of_two("/device:CPU:0")

    @tf.function(input_signature=[tf.TensorSpec([None, 5]), tf.TensorSpec([])], autograph=False)
    def step(tensor, number):
        def in_branch(name):
            with launcher.separate_order(name):
                return tf.cond(
                    number > 0,
                    lambda: launcher.gather_padded(tensor, tf.shape(tensor)[0]),
                    lambda: tensor,
                )

        return [in_branch(f"kernel {i}" if apart else "kernel") for i in range(3)]

    branches = [op for op in step.get_concrete_function().graph.get_operations() if op.type == "If"]
    assert len(branches) == 3
    waits = [[other.name in needed(op) for other in branches] for op in branches]
    expected = [[False] * 3] * 3 if apart else [[j < i for j in range(3)] for i in range(3)]
    assert waits == expected


def test_names_take_keys_of_their_own():
    launcher, tensor = launcher_of_two("/device:CPU:0"), tf.zeros([3])

    def key(name):
        with launcher.separate_order(name), launcher._keys_for("reduce", tensor):
            return int(launcher._next_instance_key())

    assert len({key(name) for name in ("a", "b", None)}) == 3


def test_keys_stay_the_same_if_one_worker_traces_once_more():
    def executed(retraced):
        launcher = launcher_of_two("/device:CPU:0")

        def step(tensor):
            keys = []
            for _ in range(6):
                with launcher._keys_for("reduce", tensor):
                    keys.append(launcher._next_instance_key())
            return keys

        function, tensor = tf.function(step, autograph=False), tf.zeros([3])
        if retraced:
            tf.function(step, autograph=False).get_concrete_function(tensor)
        return [[int(key) for key in function(tensor)] for _ in range(3)]

    keys = executed(retraced=False)
    assert keys == executed(retraced=True)
    assert all(len(set(of_step[:4])) == 4 for of_step in keys)
    # The next of a lane has another key, in this step and in the next.
    assert all(of_step[lane] != of_step[lane + 4] for of_step in keys for lane in range(2))
    assert not set(keys[0][2:4]) & set(keys[1][2:4])


def test_collectives_of_nccl_are_launched_in_order(monkeypatch):
    monkeypatch.setattr(operations.Launcher, "_on_cpu", False)
    launcher = launcher_of_two("/device:CPU:0", "NCCL")
    of_others = launcher_of_two("/device:CPU:0", "NCCL", key=2)
    of_others.serialize_with(launcher)
    ring = launcher_of_two("/device:CPU:0")

    @tf.function(input_signature=[LONG], autograph=False)
    def step(tensor):
        nccl = launcher.all_reduce(tensor), of_others.all_reduce(tensor), launcher.gather(tensor)
        return nccl, [ring.all_reduce(tensor) for _ in range(2)]

    assert waited_for(step.get_concrete_function()) == [[], [0], [0, 1], [], []]


@pytest.mark.parametrize("own_kernels", ["0", "1"])
def test_what_is_encoded_later_waits_until_the_last_is_on_its_way(own_kernels, monkeypatch):
    monkeypatch.setenv("KERAS_PSPLUS_NATIVE", own_kernels)
    launcher = launcher_of_two("/device:CPU:0")
    compressor = compression.ErrorFeedback(compression.Int8(block_size=16))
    add_up = RingSum(Hop(launcher, range(2), 0), compressor, bucket_bytes=4000)
    shapes = [(50, 20), (40, 60), (3000,), (64, 16)]

    @tf.function(input_signature=[tf.TensorSpec(shape) for shape in shapes], autograph=False)
    def step(*grads):
        variables = [Named(f"v{i}", shape) for i, shape in enumerate(shapes)]
        return add_up(list(grads), variables, tf.constant(0, tf.int64))

    graph = step.get_concrete_function().graph
    by_type = {}
    for op in graph.get_operations():
        by_type.setdefault(op.type, []).append(op)
    exchanges = by_type["CollectiveAllToAllV2"]
    # From the last back: one of the matrix of 4096 bytes, two of that of 9600, one of the first.
    assert len(exchanges) == 4
    sent = [op.inputs[0].op for op in exchanges]
    for last, following in zip(sent, sent[1:]):
        assert last.name in needed(following)
    if "KerasPsplusEncodeBlocks" in by_type:
        # Encoding leaves the residuals: there is nothing to put off.
        return
    # Residuals are not worked out before sums have been sent. The vector goes without any.
    gathers = [op for op in by_type["CollectiveGatherV2"] if op.inputs[0].shape != (1, 3000)]
    assert len(gathers) == 4
    residuals = [
        op
        for op in by_type["AssignVariableOp"]
        if op.inputs[1].shape.rank == 2 and op.inputs[1].shape[0] == 2
    ]
    assert len(residuals) == 4
    for residual, gather in zip(residuals, gathers):
        assert gather.inputs[0].op.name in needed(residual)
