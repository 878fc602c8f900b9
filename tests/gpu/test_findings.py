"""Each kind of finding is found: in graphs that were made to have it, and in no others."""

import pytest
import tensorflow as tf

from tests.gpu import kernels
from tests.gpu.findings import BATCH, COPY, EDGES, INT32, NO_KERNEL, REDUCE, WAIT, find
from tests.gpu.walk import HOST, Walk
from tests.support.tables import for_each

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


def nth_element(x):
    return tf.raw_ops.NthElement(input=x, n=5)


def product(x):
    return tf.matmul(x[tf.newaxis], x[:, tf.newaxis])


def integers(kind):
    return lambda x: tf.reshape(tf.cast(x, kind) + 1, [2, -1])


def there_and_back(x):
    y = x * 2
    with tf.device("CPU:0"):
        z = tf.nn.relu(y)
    return z + 1


def with_replaced_inputs(x):
    """As those of stand-ins of gradients are."""
    first = tf.identity(x)
    first.op._update_input(0, tf.nn.relu(x * 2))
    return first + 1


@for_each(
    "step, size, expected",
    [
        # Arithmetic, inputs that were replaced by later operations, and a kernel that is there.
        (lambda x: tf.reduce_sum(tf.abs(x) * 2), GRADIENT, set()),
        (with_replaced_inputs, GRADIENT, set()),
        (lambda x: tf.math.top_k(x, 5)[0], GRADIENT, set()),
        (nth_element, GRADIENT, {(NO_KERNEL, "NthElement")}),
        (product, GRADIENT, set()),
        (integers(tf.int64), GRADIENT, set()),
        (integers(tf.int32), GRADIENT // 1024, set()),
        (there_and_back, GRADIENT, {(COPY, "Relu"), (COPY, "AddV2"), (WAIT, "Relu")}),
        (there_and_back, GRADIENT // 4, {(WAIT, "Relu")}),
    ],
)
def test_steps(step, size, expected):
    assert found(step, tf.TensorSpec([size])) == expected


def test_operations_without_a_kernel_for_a_type_or_a_device():
    assert found(nth_element, device="CPU:0") == set()
    # It has one, of which all numbers are in host memory.
    assert found(lambda x: tf.linalg.qr(tf.reshape(x, [-1, 4]))[0]) >= {(NO_KERNEL, "Qr")}
    assert found(product, tf.TensorSpec([GRADIENT], tf.int64)) == {(NO_KERNEL, "MatMul")}


def test_integers_of_the_size_of_gradients():
    assert INT32 in {kind for kind, _ in found(integers(tf.int32))}
    # Of unknown number.
    many = found(lambda x: tf.reshape(tf.cast(tf.where(x > 0), tf.int32), [-1]))
    assert (INT32, "Reshape") in many

    def through_a_branch(x):
        many = tf.cast(x, tf.int32)
        return tf.cond(x[0] > 0, lambda: tf.cast(many, tf.float32), lambda: x)

    kinds = {kind for kind, op in found(through_a_branch) if op in ("If", "StatelessIf")}
    assert kinds == {INT32, COPY, WAIT}


@for_each("device", ["CPU:0", GPU])
def test_variables_are_where_they_were_made(device):
    with tf.device("CPU:0"):
        variable = tf.Variable(tf.zeros([GRADIENT]))
    expected = {(COPY, "AddV2")} if device == GPU else set()
    assert found(lambda x: x + variable, device=device) == expected


@for_each("dtype", [tf.bfloat16, tf.int32, tf.float32, tf.int64])
def test_all_reduces_of_types_that_gpus_refuse(dtype):
    options = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}
    options |= {"merge_op": "Add", "final_op": "Id"}

    def step(x):
        return tf.raw_ops.CollectiveReduceV2(input=tf.cast(x, dtype), **options)

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
