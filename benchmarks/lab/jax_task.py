"""One task with Keras 3 on JAX: alone, or under `keras.distribution.DataParallel` with gloo.

Runs in a Python of its own, which has JAX and Keras and needs NumPy beside them.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import itertools  # noqa: E402

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

from lab import perceptron  # noqa: E402
from lab.meter import Meter  # noqa: E402
from lab.task import Task  # noqa: E402


def join(task):
    """Joins this process to the others, with replicated variables and divided batches."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    keras.distribution.initialize(task.addresses[0], task.workers, task.rank)
    # Each process gives its own part of a batch.
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))


def make_model(work):
    if hasattr(work, "rows"):
        inputs = keras.Input((work.ids,), dtype="int32")
        rows = keras.layers.Embedding(work.rows, work.dim)(inputs)
        outputs, widths = keras.ops.sum(rows, 1), work.widths
    else:
        inputs = outputs = keras.Input(work.widths[:1])
        widths = work.widths[1:]
    return perceptron.compiled(keras, inputs, outputs, widths, work.learning_rate)


def batches(task, work):
    """This process's part of batches, for ever."""
    inputs, labels = work.batches(task.workers)
    own = slice(task.rank * work.batch_size, (task.rank + 1) * work.batch_size)
    if inputs.dtype == np.int64:  # which JAX would cut to 32 bits at every step
        inputs = inputs.astype(np.int32)
    labels = labels.astype(np.int32)
    for batch in itertools.cycle(range(len(inputs))):
        yield inputs[batch, own], labels[batch, own]


def train(task, work, plan, windows):
    """Trains for so many windows."""
    keras.utils.set_random_seed(1)
    model = make_model(work)
    meter = Meter(task.leader, task.rank, plan)

    class Windows(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # JAX goes on before a step is done, until somebody asks for what came of it.
            float(np.asarray(logs["loss"]))
            if (batch + 1) % plan["window"] == 0:
                meter.window_ended()

    steps = windows * plan["window"]
    model.fit(batches(task, work), steps_per_epoch=steps, verbose=0, callbacks=[Windows()])


def main():
    task = Task()
    if task.path != "alone":
        join(task)
    for work, plan, windows in task.works():
        train(task, work, plan, windows)


if __name__ == "__main__":
    main()
