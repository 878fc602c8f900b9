"""Trains a small model of known outcome under any kind of strategy, for tests that disturb it.

job.py KIND FOLDER [name=value ...]

KIND is all_reduce, async_ps, sync_ps or hybrid. The chief (or worker 0) prints `epoch N`, and at
the end how many updates were made and how far the weights are from those of an undisturbed run,
which `expected` works out in NumPy. Options: `stall` and `timeout` are arguments of the strategy,
and the task `missing` does not come.
"""

import json
import os
import pathlib
import sys
import time

import numpy as np

ROWS, DIM, STEPS, EPOCHS = 8, 2, 10, 3
RATE, MOMENTUM = 0.05, 0.5


def data():
    """One epoch: every batch has every row of the table."""
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * ROWS, 3)).astype("float32")
    ids = np.concatenate([random.permutation(ROWS) for _ in range(STEPS)]).astype("int32")
    return x, ids[:, np.newaxis], random.normal(size=(STEPS * ROWS, 1)).astype("float32")


def expected():
    """Table, kernel and bias after all epochs of gradient descent with momentum."""
    x, ids, y = data()
    weights = [np.zeros((ROWS, DIM)), np.zeros((3, 1)), np.zeros(1)]
    momenta = [np.zeros_like(w) for w in weights]
    for step in range(EPOCHS * STEPS):
        batch = slice(step % STEPS * ROWS, (step % STEPS + 1) * ROWS)
        table, kernel, bias = weights
        rows = ids[batch, 0]
        error = 2 / ROWS * (x[batch] @ kernel + bias + table[rows].sum(1, keepdims=True) - y[batch])
        of_table = np.zeros_like(table)
        of_table[rows] = error
        for weight, momentum, gradient in zip(
            weights, momenta, [of_table, x[batch].T @ error, error.sum(0)]
        ):
            momentum *= MOMENTUM
            momentum -= RATE * gradient
            weight += momentum
    return weights


def main():
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    options = dict(word.split("=") for word in sys.argv[3:])
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if options.get("missing") == f"{task['type']}-{task['index']}":
        return

    from tests import quick_start  # noqa: F401

    # isort: split
    import keras

    import keras_psplus as psp

    timeout = float(options.get("timeout", 60))
    common = {"startup_timeout": timeout, "stall_warning": float(options.get("stall", 60))}
    in_step = {**common, "heartbeat_timeout": timeout}
    strategy = {
        "all_reduce": lambda: psp.MultiWorkerMirroredStrategy(**in_step),
        "hybrid": lambda: psp.HybridStrategy(
            placement={"*/embeddings": "parameter_server"}, table_timeout=timeout, **in_step
        ),
        "async_ps": lambda: psp.ParameterServerStrategy(heartbeat_timeout=5, **common),
        "sync_ps": lambda: psp.ParameterServerStrategy(mode="sync", heartbeat_timeout=5, **common),
    }[kind]()

    with strategy.scope():
        x_in, ids_in = keras.Input((3,)), keras.Input((1,), dtype="int32")
        table = keras.layers.Embedding(ROWS, DIM, embeddings_initializer="zeros")
        rows = keras.layers.Lambda(lambda r: keras.ops.sum(r, (1, 2))[:, None])(table(ids_in))
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Model([x_in, ids_in], dense(x_in) + rows)
        model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse")

    class Tell(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            print(f"epoch {epoch}", flush=True)

    class Pause(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # Those who look whether a step goes on do so a few times a second.
            time.sleep(0.1)

    callbacks = [Pause(), Tell(), keras.callbacks.BackupAndRestore(folder / "backup")]
    x, ids, y = data()
    model.fit(
        [x, ids], y, batch_size=ROWS, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks
    )
    found = dict(zip([v.path for v in model.weights], model.get_weights()))
    wanted = expected()
    order = [table.embeddings.path, dense.kernel.path, dense.bias.path]
    off = max(float(np.abs(found[path] - w).max()) for path, w in zip(order, wanted))
    print(f"end iterations={int(model.optimizer.iterations.numpy())} off={off:.1e}", flush=True)


if __name__ == "__main__":
    main()
