"""Stress test for hanging steps: many short fits, evaluations and predictions.

They run in the same processes.

    keras-psplus run --workers 2 benchmarks/stress.py --seconds 600 --inter_op 1

Shapes and kinds of data change from call to call, so that graphs are traced, iterators are made and
dropped and collectives of few and many bytes follow one another. The strategy's stall line
(`--stall_warning`) says when a step waits, and for what. At the end, each worker prints how many
calls and collectives there were, and the longest call. Run a program that uses the processor beside
it: what goes wrong seldom goes wrong more often then.
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cluster.in_process import logical_devices

ROWS, BATCHES = (1, 3, 17, 129), (2, 8)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="the same on all workers")
    parser.add_argument("--inter_op", type=int, default=2, help="threads that run operations")
    parser.add_argument("--devices", type=int, default=1, help="replicas in each process")
    parser.add_argument("--stall_warning", type=float, default=15.0)
    return parser.parse_args()


def models():
    """Models of one, few and many buckets, with states of several kinds."""
    layers = keras.layers
    hidden = (
        [layers.Dense(16, "relu")],
        [layers.Dense(64), layers.BatchNormalization(), layers.Dropout(0.1)],
        [layers.Dense(300), layers.Dense(300)],
    )
    for optimizer, some in zip(("adam", "sgd", "sgd"), hidden):
        model = keras.Sequential([keras.Input((8,)), *some, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        yield model


def call(model, random):
    """One call of Keras's, by a generator that draws alike on all workers."""
    rows, batch = int(random.choice(ROWS)), int(random.choice(BATCHES))
    x = random.normal(size=(rows, 8)).astype("float32")
    y = random.integers(0, 3, rows).astype("int32")
    kind = random.integers(6)
    if kind == 0:
        model.fit(x, y, batch_size=batch, epochs=2, verbose=0)
    elif kind == 1:
        model.fit(x, y, batch_size=batch, verbose=0, validation_data=(x[:1], y[:1]))
    elif kind == 2:
        model.evaluate(x[:1], y[:1], verbose=0)
    elif kind == 3:
        model.evaluate(x, y, batch_size=batch, verbose=0)
    elif kind == 4:
        model.predict(x, batch_size=batch, verbose=0)
    else:
        # Its number of batches is unknown, so that TensorFlow asks at each step who has data.
        data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True).batch(2)
        model.evaluate(data, verbose=0)


def main():
    args = parse()
    tf.config.threading.set_inter_op_parallelism_threads(args.inter_op)
    if args.devices > 1:
        logical_devices(args.devices)
    strategy = psp.MultiWorkerMirroredStrategy(stall_warning=args.stall_warning)
    with strategy.scope():
        trained = list(models())
    random, control = np.random.default_rng(args.seed), strategy.extended.control
    start, calls, longest, stop = time.monotonic(), 0, 0.0, False
    while not stop:
        began = time.monotonic()
        call(trained[random.integers(len(trained))], random)
        longest, calls = max(longest, time.monotonic() - began), calls + 1
        if calls % 20 == 0:
            is_over = time.monotonic() - start > args.seconds
            votes = (
                control.exchange("stress", str(int(is_over))) if control else [str(int(is_over))]
            )
            stop = "1" in votes
    counters = [
        int(tf.reduce_sum(variable))
        for launcher in strategy.extended._cross_device_ops.launchers
        for variable in launcher.keys.counters.values()
    ]
    print(f"{calls} calls, {sum(counters)} collectives, the longest call {longest:.1f} s")


if __name__ == "__main__":
    main()
