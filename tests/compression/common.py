"""What the tests of several compressors share."""

import threading

import numpy as np
import tensorflow as tf
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_psplus import compression

# These take all paths, and the others are further combinations of options.
FEW = [
    compression.Cast("float16"),
    compression.Int8(block_size=5, stochastic=True),
    compression.Sign(block_size=32),
    compression.TopK(0.1, warmup_epochs=2, steps_per_epoch=3),
    compression.RandomK(0.1, unbiased=True),
    compression.PowerSGD(2, start_step=3),
    compression.ErrorFeedback(compression.TopK(0.1), momentum=0.9, factor_masking=True),
]
REST = [
    compression.Cast("bfloat16"),
    compression.Int8(),
    compression.Sign(),
    compression.TopK(0.1),
    compression.RandomK(0.1),
    compression.PowerSGD(2),
    compression.PowerSGD(1, warm_start=False),
    compression.ErrorFeedback(compression.Sign()),
    compression.ErrorFeedback(compression.PowerSGD(2)),
]
ALL = [*FEW, *REST]
REDUCIBLE = [c for c in ALL if c.reducible]

few = settings(max_examples=10, deadline=None, derandomize=True)


def arrays(max_side=70, bound=1e6, min_dims=1, max_dims=2):
    """Float32 arrays with zeros, empty ones and ones of one element among them."""
    shapes = hnp.array_shapes(min_dims=min_dims, max_dims=max_dims, min_side=0, max_side=max_side)
    elements = st.floats(-bound, bound, width=32, allow_subnormal=False)
    return hnp.arrays(np.float32, shapes, elements=elements)


def at(step):
    return tf.cast(step, tf.int64)


def round_trip(compressor, tensor, state=None, step=0):
    """Encodes and decodes a tensor; returns what arrives and the new state."""
    tensor = tf.convert_to_tensor(tensor)
    if state is None:
        state = compressor.init(tensor.shape, tensor.dtype)
    payload, state = compressor.encode(tensor, state, at(step))
    return compressor.decode(payload, tensor.shape, tensor.dtype, at(step)), state


def use_gpus(monkeypatch, number):
    """Has compressors choose what they do where there are GPUs; all is computed on the CPU."""
    devices = [tf.config.LogicalDevice("/device:GPU:0", "GPU")] * number
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: devices)


def bytes_of(payload):
    return sum(int(tf.size(tensor)) * tensor.dtype.size for tensor in payload)


def on_workers(count, work):
    """Runs `work(worker, all_mean)` for each worker in a thread; returns their results."""
    barrier = threading.Barrier(count, timeout=60)
    shared, results = [None] * count, [None] * count

    def run(worker):
        def all_mean(tensors):
            shared[worker] = tensors
            barrier.wait()
            means = [tf.add_n(each) / len(each) for each in zip(*shared)]
            barrier.wait()
            return means

        results[worker] = work(worker, all_mean)

    threads = [threading.Thread(target=run, args=[worker]) for worker in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
