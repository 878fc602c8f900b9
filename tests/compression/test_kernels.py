import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from keras_psplus import compression
from keras_psplus.compression.sparse import indices
from tests.compression.common import ALL

pytestmark = pytest.mark.skipif(
    all(k.device_type != "GPU" for k in kernels.get_registered_kernels_for_op("MatMul").kernel),
    reason="this TensorFlow was built without GPU kernels",
)


def runs_on_gpu(op):
    """Whether TensorFlow has a kernel of this op, for its types, that a GPU's graph can use."""
    types = {name: op.node_def.attr[name].type for name in op.node_def.attr}
    for kernel in kernels.get_registered_kernels_for_op(op.type).kernel:
        allowed = {c.name: c.allowed_values.list.type for c in kernel.constraint}
        if kernel.device_type in ("GPU", "DEFAULT") and all(
            types[name] in values for name, values in allowed.items()
        ):
            return True
    return False


def functions_of(graph):
    yield graph
    for name in graph._functions:
        yield graph._get_function(name).graph


def for_processors_only(function, *specs):
    """Types of a function's ops that have no such kernel."""
    graph = function.get_concrete_function(*specs).graph
    ops = [op for each in functions_of(graph) for op in each.get_operations()]
    return {op.type for op in ops if not runs_on_gpu(op)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_every_op_has_a_kernel_for_gpus(compressor, dtype):
    """No GPU is needed to ask; where there is none, TensorFlow would fall back to the CPU."""

    @tf.function(autograph=False)
    def there_and_back(tensor, step):
        payload, state = compressor.encode(tensor, compressor.init([40, 30], dtype), step)
        payload = compression.unpack(compression.pack(payload), payload)
        return compressor.decode(payload, [40, 30], dtype, step), state

    specs = tf.TensorSpec([40, 30], dtype), tf.TensorSpec([], tf.int64)
    assert for_processors_only(there_and_back, *specs) == set()


def test_indices_in_long_rows_have_kernels_for_gpus(monkeypatch):
    gpu = tf.config.LogicalDevice("/device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [gpu])

    @tf.function(autograph=False)
    def there_and_back(found):
        return indices.decode_indices_u16(*indices.encode_indices_u16(found, 300_000))

    assert for_processors_only(there_and_back, tf.TensorSpec([1, 1000], tf.int32)) == set()


def test_an_op_for_cpus_only_would_be_found():
    with tf.Graph().as_default():
        shuffled = tf.random.experimental.index_shuffle(tf.range(3), [1, 2], 2)
    assert not runs_on_gpu(shuffled.op)
