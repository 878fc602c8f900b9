"""Trains by a strategy that parts a model over tasks, is killed, and goes on in another cluster.

sizes_job.py STRATEGY FOLDER [whole] [kill=EPOCH:BATCH]

With `whole`, one call of `fit` is left alone first. The next one resumes from the folder's backup,
if there is one. With `kill`, a task kills itself by SIGKILL after a batch, and the chief of a
pipeline kills a worker; otherwise the chief prints weights, its optimizer's variables and logs as a
line of JSON.
"""

import json
import os
import pathlib
import signal
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from tests.faults.at_batch import AtBatch

ROWS, BATCH, EPOCHS, IDS = 70, 10, 4, 50
SAVE_FREQ = 3
# Strategies whose jobs go on with another number of workers, too.
WORKERS_CHANGE = "hybrid", "placement", "sync", "all_reduce", "mirrored"
# Those that are killed, and end, in the middle of an accumulation.
ACCUMULATE = "all_reduce", "mirrored"


def servers():
    return len(json.loads(os.environ["TF_CONFIG"])["cluster"]["ps"])


def sharded():
    return tf.distribute.experimental.partitioners.FixedShardsPartitioner(servers())


STRATEGIES = {
    "all_reduce": psp.MultiWorkerMirroredStrategy,
    "mirrored": lambda: psp.HybridStrategy(placement="mirrored"),
    "hybrid": lambda: psp.HybridStrategy(placement="parameter_server"),
    # Tables that servers have written are those of workers then, and the other way round.
    "placement": lambda: psp.HybridStrategy(
        placement="mirrored" if servers() == 1 else "parameter_server"
    ),
    "sync": lambda: psp.ParameterServerStrategy(variable_partitioner=sharded(), mode="sync"),
    # With one worker its steps have an order.
    "async": lambda: psp.ParameterServerStrategy(variable_partitioner=sharded()),
    "pipeline": lambda: psp.PipelineStrategy(2, "flops"),
}


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def make(dropout, optimizer):
    # Of drawn initial rows, servers draw those of tables.
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(IDS, 3, embeddings_initializer="ones"),
            layers.Flatten(),
            layers.Dense(8, "tanh"),
            layers.Dropout(dropout),
            layers.Dense(6, "tanh"),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def main():
    name, folder, options = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    (folder / f"{task['type']}-{task['index']}.pid").write_text(str(os.getpid()))
    strategy = STRATEGIES[name]()
    random = np.random.default_rng(0)
    x = random.integers(0, IDS, (ROWS, 4)).astype("int32")
    y = random.normal(size=(ROWS, 1)).astype("float32")

    def train(what, backup, *callbacks):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            # Each worker drops units of its own.
            dropout = 0.0 if name in WORKERS_CHANGE else 0.3
            if name == "placement":
                # The same on servers and on workers, where slots of other rows decay, too.
                optimizer = keras.optimizers.SGD(0.5)
            else:
                steps = 5 if name in ACCUMULATE else None
                optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=steps)
            model = make(dropout, optimizer)
        log = folder / f"{backup}-{strategy.task.name}.csv"
        callbacks = [
            keras.callbacks.BackupAndRestore(folder / backup, save_freq=SAVE_FREQ),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0),
            keras.callbacks.CSVLogger(log),
            *callbacks,
        ]
        history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        variables = [*model.variables, *model.optimizer.variables]
        found = {f"variable {i}": v.numpy().tolist() for i, v in enumerate(variables)}
        found |= {f"history of {k}": v for k, v in history.history.items()}
        if strategy.is_chief:
            found["rows of the log"] = len(log.read_text().splitlines())
            print(json.dumps([what, found]), flush=True)

    if "whole" in options:
        train("whole", "whole")
    kills = [option.removeprefix("kill=") for option in options if option.startswith("kill=")]
    callbacks = []
    if strategy.task.name in ("chief-0", "worker-1"):
        victim = "worker-1" if name == "pipeline" else strategy.task.name
        pid = int((folder / f"{victim}.pid").read_text())
        callbacks = [AtBatch(*map(int, at.split(":")), lambda: kill(pid)) for at in kills]
    train("resumed", "backup", *callbacks)


if __name__ == "__main__":
    main()
