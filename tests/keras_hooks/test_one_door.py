"""keras.src is imported in one module only, and without our strategies Keras is as it was."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus
from keras_psplus.keras_hooks import hook
from tests.support.jobs import run_script


def test_keras_internals_are_imported_by_one_module_only():
    root = pathlib.Path(next(iter(keras_psplus.__path__)))
    importers = [
        path.name
        for path in root.rglob("*.py")
        if re.search(r"^\s*(from|import) keras\.src", path.read_text(), re.MULTILINE)
    ]
    assert set(importers) == {"keras_parts.py"}


def test_tensorflow_internals_are_imported_by_one_package_only():
    root = pathlib.Path(next(iter(keras_psplus.__path__)))
    importers = [
        path.relative_to(root).parts[0]
        for path in root.rglob("*.py")
        if re.search(
            r"^\s*(from|import) tensorflow\.(python|core|compiler)", path.read_text(), re.MULTILINE
        )
    ]
    assert set(importers) == {"tf_internals"}


def test_the_hooks_know_no_strategy():
    root = pathlib.Path(next(iter(keras_psplus.__path__)))
    strategies = "all_reduce|parameter_server|hybrid|pipeline"
    for path in [*(root / "keras_hooks").glob("*.py"), root / "engine.py"]:
        assert not re.search(
            rf"import .*({strategies})|keras_psplus\.({strategies})", path.read_text()
        )


def test_other_strategies_have_no_engine(monkeypatch):
    # Tables in memory, which an earlier test of this process may have made, have one.
    monkeypatch.setattr(hook.local, "engine_in_use", lambda: None)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        assert hook.of_scope() is None
        assert hook.of_optimizer(keras.optimizers.SGD()) is None
    assert hook.of_scope() is None
    assert hook.of_step() is None


PLAIN = """
import sys
import keras, numpy as np
if sys.argv[1] == "with":
    import keras_psplus
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(clipnorm=1.0), "mse", metrics=["mae"])
x = np.arange(40, dtype="float32").reshape(10, 4) / 40
history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
print("results", [float(w.sum()) for w in model.get_weights()], history.history)
"""


@pytest.mark.processes
def test_plain_keras_trains_as_without_the_library(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    logs = [run_script(script, how, timeout=120) for how in ("with", "without")]
    first, second = (
        [line for line in log.splitlines() if line.startswith("results")] for log in logs
    )
    assert first == second != []


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
