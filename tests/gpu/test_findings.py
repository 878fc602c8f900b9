"""Each kind of finding is found: in graphs that were made to have it, and in no others."""

import pytest
import tensorflow as tf

from tests.gpu import kernels
from tests.gpu.findings import BATCH, COPY, EDGES, INT32, NO_KERNEL, REDUCE, WAIT, find
from tests.gpu.walk import HOST, Walk

GRADIENT = 1 << 16
GPU = "/job:localhost/replica:0/task:0/device:GPU:0"

pytestmark = pytest.mark.skipif(
    not kernels.are_registered(), reason="this TensorFlow was built without GPU kernels"
)


def found(step, *specs, device=GPU):
    """Kinds and operations of what is found in a function that runs on a GPU."""

    def on_device(*args):
        with tf.device(device):
            return step(*args)

    specs = specs or [tf.TensorSpec([GRADIENT])]
    function = tf.function(on_device, autograph=False).get_concrete_function(*specs)
    walk = Walk(lambda spec: spec.device_type == "GPU")
    walk.function(function, default=GPU if device == GPU else HOST)
    assert walk.on_gpu or device != GPU
    return {(each.kind, each.op) for each in find(walk, GRADIENT)}


def test_nothing_is_found_in_arithmetic():
    assert found(lambda x: tf.reduce_sum(tf.abs(x) * 2)) == set()


def test_operations_without_a_kernel():
    def step(x):
        return tf.raw_ops.NthElement(input=x, n=5)

    assert found(step) == {(NO_KERNEL, "NthElement")}
    assert found(step, device="CPU:0") == set()
    # It has one, of which all numbers are in host memory.
    assert found(lambda x: tf.linalg.qr(tf.reshape(x, [-1, 4]))[0]) >= {(NO_KERNEL, "Qr")}
    assert found(lambda x: tf.math.top_k(x, 5)[0]) == set()


def test_kernels_of_some_types_only():
    def step(x):
        return tf.matmul(x[tf.newaxis], x[:, tf.newaxis])

    assert found(step) == set()
    assert found(step, tf.TensorSpec([GRADIENT], tf.int64)) == {(NO_KERNEL, "MatMul")}


@pytest.mark.parametrize("kind", [tf.int32, tf.int64])
def test_integers_of_the_size_of_gradients(kind):
    def step(x):
        return tf.reshape(tf.cast(x, kind) + 1, [2, -1])

    kinds = {kind for kind, _ in found(step)}
    assert (INT32 in kinds) == (kind == tf.int32)
    assert found(step, tf.TensorSpec([GRADIENT // 1024])) == set()


def test_integers_of_unknown_number():
    assert (INT32, "Reshape") in found(
        lambda x: tf.reshape(tf.cast(tf.where(x > 0), tf.int32), [-1])
    )


def test_integers_that_go_through_a_branch():
    def step(x):
        many = tf.cast(x, tf.int32)
        return tf.cond(x[0] > 0, lambda: tf.cast(many, tf.float32), lambda: x)

    assert {kind for kind, op in found(step) if op in ("If", "StatelessIf")} == {INT32, COPY, WAIT}


def test_copies_between_host_and_gpu():
    def step(x):
        y = x * 2
        with tf.device("CPU:0"):
            z = tf.nn.relu(y)
        return z + 1

    assert found(step) == {(COPY, "Relu"), (COPY, "AddV2"), (WAIT, "Relu")}
    assert found(step, tf.TensorSpec([GRADIENT // 4])) == {(WAIT, "Relu")}


@pytest.mark.parametrize("device", ["CPU:0", GPU])
def test_variables_are_where_they_were_made(device):
    with tf.device("CPU:0"):
        variable = tf.Variable(tf.zeros([GRADIENT]))
    expected = {(COPY, "AddV2")} if device == GPU else set()
    assert found(lambda x: x + variable, device=device) == expected


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.int32, tf.float32, tf.int64])
def test_all_reduces_of_types_that_gpus_refuse(dtype):
    def step(x):
        return tf.raw_ops.CollectiveReduceV2(
            input=tf.cast(x, dtype),
            group_size=2,
            group_key=1,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )

    refused = dtype in (tf.bfloat16, tf.int32)
    assert ((REDUCE, "CollectiveReduceV2") in found(step)) == refused
    assert found(step, device="CPU:0") == set()


def test_predicates_that_gpus_wait_for():
    def step(x, size=None):
        with tf.device("CPU:0"):
            is_long = size is None or size > 1
        return tf.cond(x[0] > 0 if size is None else is_long, lambda: x * 2, lambda: x)

    assert {kind for kind, op in found(step) if op.endswith("If")} == {WAIT}
    both = tf.TensorSpec([GRADIENT]), tf.TensorSpec([], tf.int32)
    assert found(step, *both) == set()

    def loop(x):
        return tf.while_loop(lambda y: y[0] < 5, lambda y: [y + 1], [x * 2])

    assert {kind for kind, op in found(loop) if op.endswith("While")} == {WAIT}


def test_round_trips_over_the_host():
    with tf.device("CPU:0"):
        total = tf.Variable(0.0)

    def step(x, returns):
        y = x * 2
        with tf.device("CPU:0"):
            doubled = y[0] * 2
            total.assign_add(doubled)
        return y + doubled if returns else y + tf.cast(tf.shape(y)[0], tf.float32)

    assert {kind for kind, _ in found(lambda x: step(x[:9], True))} == {WAIT}
    # The host is behind, and nobody waits for it.
    assert found(lambda x: step(x[:9], False)) == set()


def test_control_edges_to_the_host():
    def step(x, waits):
        products = [x * 2, x * 3]
        with tf.control_dependencies(products), tf.device("CPU:0"):
            time = tf.timestamp()
        with tf.control_dependencies([time] if waits else []):
            return x + 1

    assert found(lambda x: step(x, False)) == {(EDGES, "Timestamp")}
    assert found(lambda x: step(x, True)) == {(EDGES, "Timestamp"), (WAIT, "Timestamp")}


def test_batches_that_are_copied_in_the_step():
    iterator = iter(tf.data.Dataset.from_tensors(tf.ones([2])))
    assert found(lambda iterator: iterator.get_next() + 1, iterator) == {(BATCH, "IteratorGetNext")}


def test_inputs_that_were_replaced_by_later_operations():
    """As those of stand-ins of gradients are."""

    def step(x):
        first = tf.identity(x)
        first.op._update_input(0, tf.nn.relu(x * 2))
        return first + 1

    assert found(step) == set()
