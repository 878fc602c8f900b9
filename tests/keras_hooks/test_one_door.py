"""keras.src is imported in keras_hooks only, and without our strategies Keras is as it was."""

import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus.keras_hooks.ownership import our_scope, our_step, ours


def test_keras_internals_are_imported_by_the_hooks_only():
    root = pathlib.Path(next(iter(keras_psplus.__path__)))
    importers = [
        path.relative_to(root).parts[0]
        for path in root.rglob("*.py")
        if re.search(r"^\s*(from|import) keras\.src", path.read_text(), re.MULTILINE)
    ]
    assert set(importers) == {"keras_hooks"}


def test_other_strategies_are_not_ours():
    assert ours(tf.distribute.get_strategy()) is None
    assert ours(tf.distribute.OneDeviceStrategy("/cpu:0")) is None
    assert our_scope() is None
    assert our_step() is None


def test_plain_keras_trains_as_without_the_library():
    source = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np
if sys.argv[1] == "with":
    import keras_psplus
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(clipnorm=1.0), "mse", metrics=["mae"])
x = np.arange(40, dtype="float32").reshape(10, 4) / 40
history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
print([float(w.sum()) for w in model.get_weights()], history.history)
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", source, how], capture_output=True, text=True, timeout=120
        )
        for how in ("with", "without")
    ]
    assert outputs[0].returncode == 0, outputs[0].stderr[-3000:]
    assert outputs[0].stdout == outputs[1].stdout != ""


def test_one_replica_is_plain_keras():
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.is_chief
    assert strategy.task is None
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, epochs=2)
    assert history.history["loss"][1] < history.history["loss"][0]
