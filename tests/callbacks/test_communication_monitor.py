"""What CommunicationMonitor puts into the logs, with a strategy that only counts."""

import logging
import math
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.summary.summary_iterator import summary_iterator

import keras_psplus
from keras_psplus import log
from keras_psplus.callbacks import CommunicationMonitor
from keras_psplus.communication import Communication, Traffic
from tests.support.jobs import WITHOUT_TENSORFLOW, run_script
from tests.support.tables import for_each

NAMES = ["comm/bytes", "comm/ratio", "comm/seconds"]
ROWS, BATCHES = 35, 9  # of 4 rows, the last of 3


class Sending(keras.callbacks.Callback):
    """Sends 1000 bytes as 100, and waits for 2 seconds, at each step; nothing when it tests."""

    async_safe = True

    def __init__(self, communication, steps_per_execution=1, while_testing=0):
        super().__init__()
        self.steps = 0
        self.waits = 0.0
        self.reads = 0
        self.steps_per_execution = steps_per_execution
        self.while_testing = while_testing
        self.left = BATCHES
        communication.add_source(self.traffic, lambda: self.waits)

    def traffic(self):
        self.reads += 1
        sizes = (1000 * self.steps, 100 * self.steps, 150 * self.steps)
        return [Traffic("dense/kernel", "gradient", "x", *sizes)]

    def on_epoch_begin(self, epoch, logs=None):
        self.left = BATCHES

    def on_train_batch_begin(self, batch, logs=None):
        steps = min(self.left, self.steps_per_execution)
        self.left -= steps
        self.steps += steps
        self.waits += 2 * steps

    def on_test_batch_begin(self, batch, logs=None):
        self.steps += self.while_testing
        self.waits += self.while_testing


class Recording(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))


@pytest.fixture
def communication(monkeypatch):
    """That of the strategy under which models are made, as if it were one of ours."""
    strategy = type(tf.distribute.get_strategy())
    communication = Communication()
    monkeypatch.setattr(strategy, "communication", communication, raising=False)
    monkeypatch.setattr(strategy, "is_chief", True, raising=False)
    return communication


@pytest.fixture
def warnings(monkeypatch):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(log, "_logged", set())
    log.logger.addHandler(handler)
    yield lines
    log.logger.removeHandler(handler)


def fit(*callbacks, model=None, steps_per_execution=1, **kwargs):
    if model is None:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    x = np.ones((ROWS, 2), "float32")
    kwargs = {"batch_size": 4, "epochs": 3, "verbose": 0} | kwargs
    return model.fit(x, x[:, :1], callbacks=list(callbacks), **kwargs)


def test_history_has_what_each_step_costs(communication):
    history = fit(CommunicationMonitor(), Sending(communication)).history
    assert history["comm/bytes"] == [150] * 3
    assert history["comm/ratio"] == [10] * 3
    assert history["comm/seconds"] == [2] * 3


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_its_place_among_callbacks_does_not_matter(place, communication, tmp_path):
    callbacks = [
        Sending(communication),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.EarlyStopping("loss", patience=9),
    ]
    callbacks.insert(place, CommunicationMonitor())
    assert fit(*callbacks).history["comm/bytes"] == [150] * 3
    header = (tmp_path / "log.csv").read_text().splitlines()[0].split(",")
    assert ("comm/bytes" in header) == (place < 2)


def test_batch_logs_have_what_steps_cost_up_to_now(communication):
    recording = Recording()
    fit(CommunicationMonitor(update_interval=0), Sending(communication), recording)
    assert len(recording.batches) == 3 * BATCHES
    for logs in recording.batches:
        assert [logs[name] for name in NAMES] == [150, 10, 2]
        assert "loss" in logs


def test_totals_are_not_read_at_each_batch(communication):
    sending, recording = Sending(communication), Recording()
    fit(CommunicationMonitor(update_interval=1e6), sending, recording, epochs=1)
    assert all(logs["comm/bytes"] == 150 for logs in recording.batches)
    # At the epoch's begin and its first batch, and twice at its end; seconds need them as well.
    assert sending.reads <= 8 < BATCHES


def test_progress_bar_shows_them(communication, capsys):
    fit(CommunicationMonitor(), Sending(communication), verbose=2, epochs=1)
    assert "comm/bytes: 150.0" in capsys.readouterr().out


def test_validation_does_not_count(communication):
    x = np.ones((8, 2), "float32")
    history = fit(
        CommunicationMonitor(),
        Sending(communication, while_testing=7),
        validation_data=(x, x[:, :1]),
    ).history
    assert history["comm/bytes"] == [150] * 3
    assert history["comm/seconds"] == [2] * 3
    assert not [name for name in history if name.startswith("val_comm")]


def test_steps_per_execution(communication):
    sending = Sending(communication, steps_per_execution=4)
    history = fit(CommunicationMonitor(), sending, steps_per_execution=4).history
    assert history["comm/bytes"] == [150] * 3


def test_several_fits_with_one_monitor(communication):
    monitor, sending = CommunicationMonitor(), Sending(communication)
    model = fit(monitor, sending).model
    sending.steps += 1000  # by another model, say
    assert fit(monitor, sending, model=model).history["comm/bytes"] == [150] * 3


def test_nothing_compressed_is_an_infinite_ratio(communication):
    communication.add_source(
        lambda: [Traffic("a", "gradient", "NoCommunication()", next(counter), 0, 0)], lambda: 0.0
    )
    counter = iter(range(10**6))
    assert fit(CommunicationMonitor(), epochs=1).history["comm/ratio"] == [math.inf]


def scalars(folder):
    found = {}
    for path in sorted(pathlib.Path(folder).rglob("*tfevents*")):
        for event in summary_iterator(str(path)):
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, []).append((event.step, number))
    return found


@pytest.mark.parametrize("as_path", [str, pathlib.Path])
def test_tensorboard(as_path, communication, tmp_path):
    fit(CommunicationMonitor(as_path(tmp_path / "tb")), Sending(communication), epochs=2)
    assert scalars(tmp_path) == {
        "comm/bytes": [(0, 150), (1, 150)],
        "comm/ratio": [(0, 10), (1, 10)],
        "comm/seconds": [(0, 2), (1, 2)],
    }


def test_only_the_chief_writes(communication, monkeypatch, tmp_path):
    monkeypatch.setattr(type(tf.distribute.get_strategy()), "is_chief", False)
    history = fit(CommunicationMonitor(tmp_path / "tb"), Sending(communication)).history
    assert history["comm/bytes"] == [150] * 3
    assert not (tmp_path / "tb").exists()


def test_plain_keras_has_no_entries_and_one_warning(warnings, tmp_path):
    monitor = CommunicationMonitor(tmp_path / "tb")
    x = np.ones((8, 2), "float32")
    history = fit(monitor, validation_data=(x, x[:, :1])).history
    fit(monitor)
    assert sorted(history) == ["loss", "val_loss"]
    assert not (tmp_path / "tb").exists()
    assert len(warnings) == 1 and "is not trained by a strategy of keras_psplus" in warnings[0]


def test_nothing_sent_is_zeros_and_one_warning(communication, warnings):
    history = fit(CommunicationMonitor()).history
    assert [history[name] for name in NAMES] == [[0] * 3, [1] * 3, [0] * 3]
    assert len(warnings) == 1 and "nothing was sent" in warnings[0]


def test_one_replica_of_our_strategy(warnings):
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    history = fit(CommunicationMonitor(), model=model).history
    assert history.get("comm/bytes", [0] * 3) == [0] * 3
    assert len(warnings) == 1


@for_each(
    "arguments, words",
    [
        ({"log_dir": 3}, "log_dir=3"),
        ({"log_dir": ""}, "log_dir=''"),
        ({"update_interval": -1}, "update_interval=-1"),
        ({"update_interval": "often"}, "update_interval='often'"),
        ({"update_interval": True}, "update_interval=True"),
        ({"update_interval": math.nan}, "update_interval=nan"),
    ],
)
def test_arguments_of_no_use(arguments, words):
    with pytest.raises(ValueError, match=f"Received: {words}"):
        CommunicationMonitor(**arguments)


def test_modules_are_there_after_a_bare_import(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import keras_psplus
assert keras_psplus.callbacks.CommunicationMonitor().log_dir is None
assert keras_psplus.compression.PowerSGD(4).rank == 4
from keras_psplus import *
assert compression.Sign().block_size == 1024
""")
    run_script(script)


def test_the_launcher_imports_neither():
    source = """
import keras_psplus
assert "tensorflow" not in sys.modules and "keras_psplus.compression" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", WITHOUT_TENSORFLOW + source], check=True)
