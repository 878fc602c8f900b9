import pytest
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import sparse
from tests.compression.common import ALL, use_gpus
from tests.gpu import kernels
from tests.support.tables import for_each

pytestmark = pytest.mark.skipif(
    not kernels.are_registered(), reason="this TensorFlow was built without GPU kernels"
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    use_gpus(monkeypatch, 1)


def functions_of(graph):
    yield graph
    for name in graph._functions:
        yield graph._get_function(name).graph


def for_processors_only(function, *specs):
    """Types of a function's ops that have no such kernel."""
    graph = function.get_concrete_function(*specs).graph
    ops = [op for each in functions_of(graph) for op in each.get_operations()]
    return {op.type for op in ops if kernels.kernel_for(op) is None}


@pytest.mark.extended
@for_each("dtype, shape", [("bfloat16", [40, 30]), ("float32", [400, 300])])
@for_each("compressor", ALL)
def test_every_op_has_a_kernel_for_gpus(compressor, dtype, shape):
    """No GPU is needed to ask; where there is none, TensorFlow would fall back to the CPU."""

    @tf.function(autograph=False)
    def there_and_back(tensor, step):
        payload, state = compressor.encode(tensor, compressor.init(shape, dtype), step)
        payload = compression.unpack(compression.pack(payload), payload)
        return compressor.decode(payload, shape, dtype, step), state

    specs = tf.TensorSpec(shape, dtype), tf.TensorSpec([], tf.int64)
    assert for_processors_only(there_and_back, *specs) == set()


def test_indices_in_long_rows_have_kernels_for_gpus():
    @tf.function(autograph=False)
    def there_and_back(found):
        return sparse.decode_indices_u16(*sparse.encode_indices_u16(found, 300_000))

    assert for_processors_only(there_and_back, tf.TensorSpec([1, 1000], tf.int32)) == set()


def test_an_op_for_cpus_only_would_be_found():
    with tf.Graph().as_default():
        shuffled = tf.random.experimental.index_shuffle(tf.range(3), [1, 2], 2)
    assert kernels.kernel_for(shuffled.op) is None
