"""Milliseconds a step of a model with a table for any id, beside TFRA.

    python3.11 -m venv /tmp/tfra
    /tmp/tfra/bin/pip install tensorflow==2.16.2 tf_keras==2.16.0 \
        tensorflow-recommenders-addons==0.8.1
    python benchmarks/beside_tfra.py --tfra /tmp/tfra/bin/python [--busy 2] [--turns 4]
    python benchmarks/beside_tfra.py --tfra /tmp/tfra/bin/python --keys 20

Each library has a process, which waits while the other one trains some steps of `fit`: batches of
4,096 x 26 ids, rows of 32, a dense layer on them, Adam. Ids come after Zipf's law, or are all new.
With `--busy`, so many other processes compute all the time. With `--keys`, a process first trains
with so many millions of new keys, and ends before the other one begins, as memory is short.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

BATCH, IDS, DIM, RATE = 4096, 26, 32, 0.001
# Ids that come again, of which the k-th is as frequent as 1 / k.
KNOWN = 1_000_000
FACTOR = 0x1E3779B97F4A7C15
LIBRARIES = "keras_psplus", "tfra"
# In which keys of `--keys` are made.
STRETCHES = 10


def model_of_psplus():
    """A model on `DynamicEmbedding`, and Keras's callback."""
    import keras

    import keras_psplus as psp

    ids = keras.Input((IDS,), dtype="int64")
    rows = psp.layers.DynamicEmbedding(DIM, initializer="normal", name="rows")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(keras.optimizers.Adam(RATE), "mse")
    return model, keras.callbacks.Callback


def model_of_tfra():
    """The same on TFRA's `Embedding`."""
    os.environ.update(TF_USE_LEGACY_KERAS="1")
    import tf_keras as keras
    from tensorflow_recommenders_addons import dynamic_embedding as de

    ids = keras.Input((IDS,), dtype="int64")
    initializer = keras.initializers.RandomNormal(seed=1)
    rows = de.keras.layers.Embedding(DIM, initializer=initializer, devices=["/CPU:0"], name="rows")(
        ids
    )
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.legacy.Adam(RATE))
    model.compile(optimizer, "mse")
    return model, keras.callbacks.Callback


def train(library):
    """Trains as often as a line of standard input says, and answers the cost."""
    import numpy as np
    import tensorflow as tf

    model, base = model_of_psplus() if library == LIBRARIES[0] else model_of_tfra()
    times, random, made = [], np.random.default_rng(0), 0
    known = random.integers(-(2**62), 2**62, KNOWN)
    weights = np.cumsum(1 / np.arange(1, KNOWN + 1))

    class Clock(base):
        def on_train_batch_begin(self, batch, logs=None):
            self.begun = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            times.append(1e3 * (time.perf_counter() - self.begun))

    def batches(kind, steps):
        size = BATCH * IDS
        if kind == "zipf":
            places = np.searchsorted(weights, random.random(steps * size) * weights[-1])
            return tf.data.Dataset.from_tensor_slices(known[places].reshape(steps, BATCH, IDS))
        # The n-th new key is n times an odd number, so that nobody has to keep them.
        first = made - steps * size

        def numbers(step):
            if kind == "new":
                return first + step * size + tf.range(size, dtype=tf.int64)
            return tf.random.uniform([size], 0, made, tf.int64, seed=1)

        keys = tf.data.Dataset.range(steps).map(lambda step: numbers(step) * FACTOR)
        return keys.map(lambda keys: tf.reshape(keys, [BATCH, IDS]))

    for line in sys.stdin:
        kind, steps = line.split()[0], int(line.split()[1])
        if kind == "new":
            made += steps * BATCH * IDS
        data = batches(kind, steps).map(lambda x: (x, tf.ones([BATCH, 1])))
        times.clear()
        begun = resource.getrusage(resource.RUSAGE_SELF)
        model.fit(data.prefetch(1), verbose=0, callbacks=[Clock()])
        ended = resource.getrusage(resource.RUSAGE_SELF)
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        found = {"times": times, "resident": resident, "peak": 1024 * ended.ru_maxrss}
        for what in ("utime", "stime"):
            used = getattr(ended, f"ru_{what}") - getattr(begun, f"ru_{what}")
            found[what] = 1e3 * used / steps
        print(f"\n> {json.dumps(found)}", flush=True)


class Library:
    """A process that trains."""

    def __init__(self, python, name):
        args = [python, __file__, "--train", name]
        self._process = subprocess.Popen(
            args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()

    def fit(self, kind, steps):
        print(kind, steps, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        raise SystemExit(f"A process of this benchmark ended by {self._process.wait()}.")


@contextlib.contextmanager
def busy(count):
    """Context in which so many other processes compute."""
    # They end with this process.
    code = "import os; own = os.getppid()\nwhile os.getppid() == own: sum(range(9999))"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def say(what, found):
    times = found["times"]
    print(
        f"{what:26} median {statistics.median(times):6.0f} ms, longest {max(times):6.0f}; "
        f"processor {found['utime']:5.0f} + {found['stime']:4.0f} ms a step; "
        f"memory {found['resident'] / 1e9:.2f} GB, at most {found['peak'] / 1e9:.2f}",
        flush=True,
    )


def main():
    """Prints times of both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tfra", help="Python that has TFRA")
    parser.add_argument("--busy", type=int, default=0, help="other processes")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--keys", type=float, help="millions, one library after the other")
    parser.add_argument("--train", choices=LIBRARIES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train)
        return
    pythons = {LIBRARIES[0]: sys.executable, LIBRARIES[1]: args.tfra}
    pythons = {name: python for name, python in pythons.items() if python}
    if args.keys:
        for name, python in pythons.items():
            with Library(python, name) as one:
                made, stretch = 0, round(args.keys * 1e6 / BATCH / IDS / STRETCHES)
                for _ in range(STRETCHES):
                    found, made = one.fit("new", stretch), made + stretch * BATCH * IDS
                    say(f"{name}, {made / 1e6:.1f} M keys", found)
                say(f"{name}, of these keys", one.fit("again", args.steps))
        return
    with contextlib.ExitStack() as stack:
        every = {
            name: stack.enter_context(Library(python, name)) for name, python in pythons.items()
        }
        for one in every.values():
            one.fit("zipf", 5), one.fit("new", 2)
        stack.enter_context(busy(args.busy))
        for turn in range(args.turns):
            for kind in ("zipf", "new"):
                for name, one in every.items():
                    say(f"{turn + 1}: {kind}, {name}", one.fit(kind, args.steps))


if __name__ == "__main__":
    main()
