"""Trains by one strategy; the first time, the launcher is told to end in the middle of an epoch.

preemption_job.py FOLDER STRATEGY
"""

import json
import os
import pathlib
import signal
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp
from keras_psplus.cluster.process import signals
from tests.faults.at_batch import AtBatch

folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
STRATEGIES = {
    "all_reduce": psp.MultiWorkerMirroredStrategy,
    "hybrid": psp.HybridStrategy,
    "sync_parameter_server": lambda: psp.ParameterServerStrategy(mode="sync"),
    "pipeline": lambda: psp.PipelineStrategy(microbatches=2),
    "shard_optimizer": lambda: psp.MultiWorkerMirroredStrategy(shard="optimizer"),
    "shard_all": lambda: psp.MultiWorkerMirroredStrategy(shard="all"),
    "model_parallel": psp.ModelParallelStrategy,
    "async_parameter_server": psp.ParameterServerStrategy,
}


def tell_launcher():
    """Has the launcher told to end, once in a job."""
    if not (folder / "told").exists():
        (folder / "told").touch()
        os.kill(os.getppid(), signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not signals.SIGNAL.is_noted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    elif kind != "all_reduce":
        time.sleep(3)  # In which the chief hears of a server that is told.


keras.utils.set_random_seed(1)
strategy = STRATEGIES[kind]()
with strategy.scope():
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.0), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.Adam(0.05), "mse")
x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
callbacks = [keras.callbacks.BackupAndRestore(folder / "backup")]
if strategy.is_chief:
    callbacks.append(AtBatch(1, 2, tell_launcher))
fitted = model.fit(
    x, x.sum(1), batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=callbacks
)
if strategy.is_chief:
    found = {**fitted.history, "weights": [w.tolist() for w in model.get_weights()]}
    found["steps"] = int(model.optimizer.iterations.numpy())
    (folder / "result.json").write_text(json.dumps(found))
