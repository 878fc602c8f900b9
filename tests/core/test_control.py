"""The control plane: what workers tell each other, and that it does not pile up."""

import concurrent.futures
import threading

import pytest
import tensorflow as tf

from keras_psplus.cluster import preflight
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.core.jobs import control as control_module
from keras_psplus.core.jobs import failure
from keras_psplus.core.jobs.control import ControlPlane

WORKERS = 3


class Store:
    """The key-value store of a coordination service."""

    def __init__(self):
        self.values, self.most, self._changed = {}, 0, threading.Condition()
        self.calls = 0

    def set_config_key_value(self, key, value):
        with self._changed:
            assert key not in self.values
            self.calls += 1
            self.values[key] = value
            self.most = max(self.most, len(self.values))
            self._changed.notify_all()

    def get_config_key_value(self, key, timeout_in_ms):
        with self._changed:
            self.calls += 1
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self.values[key]

    def delete_config_key_value(self, key):
        with self._changed:
            self.calls += 1
            del self.values[key]


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(control_module.context, "context", lambda: store)
    return store


def on_all_workers(function, workers=WORKERS):
    """Calls a function of a control plane on all workers; returns what each returns."""
    cluster = {"worker": tuple(f"h:{i + 1}" for i in range(workers))}
    planes = [
        ControlPlane(TaskConfig(cluster, "worker", i), 30.0, None, lambda: [])
        for i in range(workers)
    ]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, planes))


@pytest.mark.parametrize("large", [False, True])
def test_everybody_gets_everybodys_text(store, monkeypatch, large):
    monkeypatch.setattr(preflight, "EVERYBODY", 2 if large else 32)

    def exchange(plane):
        plane.check_same("variable", "kernel", "a kernel")
        return plane.exchange("data", f"of {plane.task.name}")

    assert on_all_workers(exchange) == [["of worker-0", "of worker-1", "of worker-2"]] * WORKERS


def test_a_worker_that_makes_something_else_is_named(store, monkeypatch):
    monkeypatch.setattr(failure, "report", lambda message: None)

    def run(plane):
        own = "(2,)" if plane.task.name == "worker-2" else "(3,)"
        plane.check_same("variable", own, f"kernel {own}")

    with pytest.raises(ValueError, match=r"Received: variable kernel \(2,\) on worker-2"):
        on_all_workers(run)


@pytest.mark.parametrize("large", [False, True])
def test_what_all_have_read_is_deleted(store, monkeypatch, large):
    monkeypatch.setattr(preflight, "EVERYBODY", 2 if large else 32)

    def run(plane):
        for i in range(100):
            plane.check_same("variable", f"{i}", "a variable")
            assert plane.exchange("epoch end", f"{i}") == [f"{i}"] * WORKERS

    on_all_workers(run)
    # Of the last exchange, and those that somebody may be yet to read.
    assert len(store.values) == WORKERS + large
    assert store.most <= 4 * WORKERS + 2 * large


@pytest.mark.parametrize("workers", [40, 80])
def test_what_an_exchange_costs_grows_with_the_workers_not_with_their_square(store, workers):
    texts = [f"of worker-{i}" for i in range(workers)]
    results = on_all_workers(lambda plane: plane.exchange("data", f"of {plane.task.name}"), workers)
    assert results == [texts] * workers
    assert store.calls <= 5 * workers


def test_in_a_large_cluster_all_learn_why_one_has_ended(store, monkeypatch):
    monkeypatch.setattr(preflight, "EVERYBODY", 2)
    monkeypatch.setattr(failure, "_failed_at", None)
    monkeypatch.setattr(failure, "_ended_address", None)
    ended = f"{failure.ENDED}worker-2 (h:3) has ended by an error. Received: OSError: disk"

    def run(plane):
        if plane.task.name == "worker-2":
            plane.post_end(ended)
            return
        with pytest.raises(failure.PeerLostError, match="worker-2 .* by an error.*OSError: disk"):
            plane.exchange("data", "text")

    on_all_workers(run)


def test_in_a_large_cluster_another_kind_is_named(store, monkeypatch):
    monkeypatch.setattr(preflight, "EVERYBODY", 2)
    monkeypatch.setattr(failure, "report", lambda message: None)

    def run(plane):
        if plane.task.name == "worker-0":
            plane.check_same("variable", "kernel", "a kernel")
            return
        with pytest.raises(ValueError, match="worker-0 is at variable.*worker-. is at data"):
            plane.exchange("data", "text")

    on_all_workers(run)
