"""The control plane: what workers tell each other, and that it does not pile up."""

import concurrent.futures
import threading

import pytest
import tensorflow as tf

from keras_psplus.cluster.config import TaskConfig
from keras_psplus.core import control as control_module
from keras_psplus.core.control import ControlPlane

WORKERS = 3


class Store:
    """The key-value store of a coordination service."""

    def __init__(self):
        self.values, self.most, self._changed = {}, 0, threading.Condition()

    def set_config_key_value(self, key, value):
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self.most = max(self.most, len(self.values))
            self._changed.notify_all()

    def get_config_key_value(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self.values[key]

    def delete_config_key_value(self, key):
        with self._changed:
            del self.values[key]


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(control_module.context, "context", lambda: store)
    return store


def on_all_workers(function):
    """Calls a function of a control plane on all workers; returns what each returns."""
    cluster = {"worker": tuple(f"h:{i + 1}" for i in range(WORKERS))}
    planes = [
        ControlPlane(TaskConfig(cluster, "worker", i), 30.0, None, lambda: [])
        for i in range(WORKERS)
    ]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(function, planes))


def test_everybody_gets_everybodys_text(store):
    def exchange(plane):
        plane.check_same("variable", "kernel", "a kernel")
        return plane.exchange("data", f"of {plane.task.name}")

    assert on_all_workers(exchange) == [["of worker-0", "of worker-1", "of worker-2"]] * WORKERS


def test_what_all_have_read_is_deleted(store):
    def run(plane):
        for i in range(100):
            plane.check_same("variable", f"{i}", "a variable")
            assert plane.exchange("epoch end", f"{i}") == [f"{i}"] * WORKERS

    on_all_workers(run)
    # Of the last exchange, and those that somebody may be yet to read.
    assert len(store.values) == WORKERS
    assert store.most <= 4 * WORKERS
