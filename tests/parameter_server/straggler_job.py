"""Two workers, of which worker-1 sleeps in every step so that it takes five times as long.

In `async` and `shares`, which do not wait for it, it sleeps longer still: where a machine is slow,
both also have the same work to do.

straggler_job.py FOLDER MODE...

Each MODE is `sync`, `backup`, `async`, `shares` (the workers read the data), `equal` (both sleep as
long), or `stale:N` for `max_staleness=N`, and `shares:N` for both. For each, some steps are taken,
and a line says by which worker, how far one was ahead of the other, and how long it took.
"""

import json
import os
import pathlib
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

import keras_psplus as psp

STEPS = 16
SECONDS = {
    "sleep": {"worker-0": 0.04, "worker-1": 0.2},
    "sleep long": {"worker-0": 0.04, "worker-1": 1.0},
    "equal": {"worker-0": 0.04, "worker-1": 0.04},
}

folder, modes = pathlib.Path(sys.argv[1]), sys.argv[2:]
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"
# A step reads files where its worker runs: what is in them is that worker's own.
(folder / name).mkdir()
os.chdir(folder / name)
pathlib.Path("number").write_text(str(task["index"]))
for file, seconds in SECONDS.items():
    pathlib.Path(file).write_text(str(int(5e5 * seconds.get(name, 0))))


def own(file, x):
    # The name depends on the batch, so that nobody reads it ahead.
    path = tf.where(tf.size(x) >= 0, file, "")
    return tf.strings.to_number(tf.io.read_file(path), tf.int64)


class Slow(keras.Model):
    def __init__(self, file):
        super().__init__()
        self.file = file
        self.dense = keras.layers.Dense(1)
        counts = dict(shape=(2,), initializer="zeros", trainable=False)
        self.begun = self.add_weight(name="begun", **counts)
        self.done = self.add_weight(name="done", **counts)
        self.ahead = self.add_weight(name="ahead", **counts)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        me = tf.one_hot(own("number", x), 2)
        before = tf.reduce_sum(self.begun * me)
        ahead = before - tf.reduce_min(self.done)
        self.begun.assign_add(me)
        self.ahead.assign_add(me * tf.nn.relu(ahead - tf.reduce_sum(self.ahead * me)))
        sleeping = tf.data.Dataset.range(1).apply(testing.sleep(own(self.file, x)))
        slept = sleeping.reduce(tf.constant(0, tf.int64), lambda total, i: total + i)
        logs = super().train_step((x + tf.cast(slept, x.dtype), y))
        with tf.control_dependencies([slept]):
            self.done.assign_add(me)
        return logs


def arguments(mode):
    name, _, bound = mode.partition(":")
    if bound:
        return dict(max_staleness=int(bound))
    return {"sync": dict(mode="sync"), "backup": dict(mode="sync", backup_workers=1)}.get(name, {})


def sleep_of(mode):
    """File of how long a worker sleeps."""
    return {"equal": "equal", "async": "sleep long", "shares": "sleep long"}.get(mode, "sleep")


resolver = None
for mode in modes:
    strategy = psp.ParameterServerStrategy(resolver, startup_timeout=60, **arguments(mode))
    # The first has made itself known to the other tasks.
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    with strategy.scope():
        model = Slow(sleep_of(mode))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.ones((2 * STEPS, 4), "float32")
    model.fit(x[:2], x[:2, :1], batch_size=2, verbose=0)
    # Workers are level when an epoch begins, whoever took the step before.
    for counter in (model.begun, model.done, model.ahead):
        counter.assign(np.zeros(2))
    begin = time.monotonic()
    if mode.startswith("shares"):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2).with_options(options)
        model.fit(data, verbose=0)
    else:
        model.fit(x, x[:, :1], batch_size=2, verbose=0)
    print(
        mode,
        json.dumps(
            {
                "steps": int(model.optimizer.iterations.numpy()) - 1,
                "taken": model.begun.numpy().round(3).tolist(),
                "ahead": model.ahead.numpy().tolist(),
                "counted": strategy.steps_by_worker,
                "dropped": strategy.dropped_gradients,
                "seconds": round(time.monotonic() - begin, 2),
            }
        ),
        flush=True,
    )
