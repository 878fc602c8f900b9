"""An asynchronous job that counts: every step adds one to a variable on a parameter server.

counting_job.py STEPS

In the environment, COUNTING_JOB_PAUSE is what each step waits, in seconds, COUNTING_JOB_COMPRESSION
how gradients are compressed, COUNTING_JOB_STATE a file for what the compressor keeps,
COUNTING_JOB_GATE a file that half of the steps wait for, COUNTING_JOB_OVERLAP says that workers
have several steps under way, and COUNTING_JOB_TABLE that a dynamic table is trained, too.
"""

import os
import pathlib
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp

steps = int(sys.argv[1])
gate = pathlib.Path(os.environ.get("COUNTING_JOB_GATE", "/"))
has_table = "COUNTING_JOB_TABLE" in os.environ
pause = float(os.environ.get("COUNTING_JOB_PAUSE", "0"))
strategy = psp.ParameterServerStrategy(
    startup_timeout=60,
    heartbeat_timeout=5,
    compression=os.environ.get("COUNTING_JOB_COMPRESSION"),
    overlap_steps="COUNTING_JOB_OVERLAP" in os.environ,
)


class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.table = psp.layers.DynamicEmbedding(1, combiner="sum") if has_table else None
        self.steps = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False, name="steps"
        )

    def call(self, x, training=False):
        rows = self.table(keras.ops.cast(x, "int64"), training=training) if has_table else 0
        return self.dense(x) + rows

    def train_step(self, data):
        self.steps.assign_add(1)
        return super().train_step(data)


class Progress(keras.callbacks.Callback):
    """Lets the test see how far the job is, and keeps it going for some seconds."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(pause)
        if batch % 50 == 0:
            print(f"batch {batch}", flush=True)
        deadline = time.monotonic() + 240
        while batch == steps // 2 and not gate.exists() and time.monotonic() < deadline:
            time.sleep(0.1)


with strategy.scope():
    model = Counting()
    model.compile(keras.optimizers.SGD(0.001), "mse")
x = np.ones((2 * steps, 4), "float32")
model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[Progress()])
print("evaluating", flush=True)
model.evaluate(x, x[:, :1], batch_size=2, verbose=0)
if "COUNTING_JOB_STATE" in os.environ:
    np.savez(os.environ["COUNTING_JOB_STATE"], **strategy.state_dict(model.optimizer))
sent = {t.path: t for t in strategy.communication.traffic() if t.direction == "gradient"}
if has_table:
    keys, (updates, _) = model.table.keys, model.table.counts()
    print("updates of rows:", dict(zip(keys.tolist(), updates.tolist())), flush=True)
print({path: (t.logical_bytes, t.wire_bytes) for path, t in sent.items()}, flush=True)
print(
    f"steps={int(model.steps.numpy())} iterations={int(model.optimizer.iterations.numpy())}"
    f" evaluated={int(model.metrics[0].count.numpy())}",
    flush=True,
)
