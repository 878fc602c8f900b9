"""Cost of encoding and decoding on one processor core, for each compressor.

    taskset -c 0 python benchmarks/compressor_cost.py

Milliseconds of the processor for a million float32 elements, medians; TensorFlow has one thread, so
that on an idle machine these are those of the clock. The column
"with feedback" is an encoding in `ErrorFeedback`, as strategies do it for those that ask for it: it
decodes as well, and keeps the residual.
"""

import argparse
import os
import statistics
import time

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.cluster.process import memory

NAMES = ["bf16", "fp16", "int8", "sign", "topk:0.01", "randomk:0.01", "powersgd:4", "powersgd:1"]
# Milliseconds for a million elements, for encoding and for decoding.
TARGETS = {"bf16": 2.0, "fp16": 2.0, "int8": 2.0, "sign": 2.0}


def measure(name, shape, repeats):
    """Median milliseconds per million elements: encode, decode, encode with error feedback."""
    compressor = compression.get(name)
    feedback = compression.ErrorFeedback(compressor)
    step = tf.constant(0, tf.int64)
    gradient = tf.random.normal(shape)

    @tf.function(autograph=False)
    def encode(tensor, state):
        return compressor.encode(tensor, state, step)

    @tf.function(autograph=False)
    def decode(payload):
        return compressor.decode(payload, shape, tf.float32, step)

    @tf.function(autograph=False)
    def encode_with_feedback(tensor, state):
        return feedback.encode(tensor, state, step)

    state, feedback_state = compressor.init(shape, "float32"), feedback.init(shape, "float32")
    payload, _ = encode(gradient, state)
    calls = (
        lambda: encode(gradient, state),
        lambda: decode(payload),
        lambda: encode_with_feedback(gradient, feedback_state),
    )
    return [_median(call, repeats) * 1e6 / gradient.shape.num_elements() for call in calls]


def _median(call, repeats):
    times = []
    for _ in range(repeats + 3):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return statistics.median(times[3:]) * 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--shape", type=int, nargs="+", default=[1600, 1600])
    parser.add_argument("--repeats", type=int, default=100)
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    # As tasks of a cluster do.
    memory.keep_freed_memory()
    print("| compressor | encode | decode | with feedback | target |")
    print("|---|---|---|---|---|")
    for name in args.names:
        encode, decode, feedback = measure(name, args.shape, args.repeats)
        target, verdict = TARGETS.get(name), ""
        if target is not None:
            verdict = f"{target:g}, {'ok' if max(encode, decode) <= target else 'MISSED'}"
        print(f"| {name} | {encode:.2f} | {decode:.2f} | {feedback:.2f} | {verdict} |", flush=True)


if __name__ == "__main__":
    main()
