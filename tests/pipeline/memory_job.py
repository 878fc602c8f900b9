"""Trains a model of 256 MB of weights, in stages or in one process, and prints its loss.

memory_job.py [--limit MB] [--save FILE]
"""

import argparse
import os
import resource

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

WIDTH, LAYERS = 2000, 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int)
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.limit:
        # Of what is private to this process, whether it is in memory or not.
        resource.setrlimit(resource.RLIMIT_DATA, (args.limit << 20, args.limit << 20))
    strategy = tf.distribute.get_strategy()
    if "TF_CONFIG" in os.environ:
        strategy = psp.PipelineStrategy(microbatches=4, schedule="1f1b", startup_timeout=60)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        stack = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *stack, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss)
    random = np.random.default_rng(0)
    x, y = random.standard_normal((64, WIDTH), np.float32), random.integers(0, 10, 64)
    history = model.fit(x, y, batch_size=32, shuffle=False, verbose=0).history
    print(f"trained {history['loss'][-1]:.5f}", flush=True)
    if args.save:
        model.save(args.save)
    print("ended", flush=True)


if __name__ == "__main__":
    main()
