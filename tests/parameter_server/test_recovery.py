"""A worker is taken back into the cluster while no step is under way."""

import threading
import types

import pytest
import tensorflow as tf

from keras_psplus.parameter_server.scheduling import recovery as recovery_module
from keras_psplus.parameter_server.scheduling.recovery import PausingRecovery
from keras_psplus.parameter_server.tracing import step_errors
from keras_psplus.tf_internals import cluster_coordinator

SECONDS = 20


class Handler:
    """What of TensorFlow's `WorkerPreemptionHandler` is used."""

    def __init__(self):
        self._server_def = "cluster"
        self._cluster_update_lock = threading.Lock()
        self._cluster_due_for_update_or_finish = threading.Event()
        self._worker_up_cond = threading.Condition(self._cluster_update_lock)
        self._error_from_recovery = None
        self._should_preemption_thread_run = True
        self._preemption_handler_thread = threading.Thread(target=self._run, daemon=True)
        self._preemption_handler_thread.start()

    def _run(self):
        self._cluster_due_for_update_or_finish.wait()
        assert not self._should_preemption_thread_run

    def lose_a_worker(self):
        """What a lane does that finds its worker lost; returns an event of its recovery."""
        is_over = threading.Event()

        def wait():
            with self._cluster_update_lock:
                self._cluster_due_for_update_or_finish.set()
                is_waiting.set()
                self._worker_up_cond.wait(SECONDS)
            is_over.set()

        is_waiting = threading.Event()
        threading.Thread(target=wait, daemon=True).start()
        assert is_waiting.wait(SECONDS)
        return is_over

    def end(self):
        self._should_preemption_thread_run = False
        self._cluster_due_for_update_or_finish.set()


@pytest.fixture
def handler():
    handler = Handler()
    yield handler
    handler.end()


@pytest.fixture
def updates(monkeypatch):
    """Events: an update has begun, it may end; and the list of what they raise."""
    state = types.SimpleNamespace(begun=threading.Event(), may_end=threading.Event(), errors=[])

    def update_server_def(server_def):
        assert server_def == "cluster"
        state.begun.set()
        assert state.may_end.wait(SECONDS)
        if state.errors:
            raise state.errors.pop(0)

    context = types.SimpleNamespace(update_server_def=update_server_def)
    monkeypatch.setattr(recovery_module.context, "context", lambda: context)
    return state


def test_the_cluster_is_mended_between_closures(handler, updates):
    is_there = threading.Event()
    recovery = PausingRecovery(handler, is_there.is_set)
    with recovery.running():
        is_over = handler.lose_a_worker()
        # Closures go on for as long as the worker is away ...
        with recovery.running():
            pass
        is_there.set()
        # ... and what is under way ends before it is taken back.
        assert not updates.begun.wait(1.5)
    assert updates.begun.wait(SECONDS)
    has_run = threading.Event()

    def run():
        with recovery.running():
            has_run.set()

    threading.Thread(target=run, daemon=True).start()
    assert not has_run.wait(0.3)
    assert not is_over.is_set()
    updates.may_end.set()
    assert is_over.wait(SECONDS) and has_run.wait(SECONDS)
    assert not handler._cluster_due_for_update_or_finish.is_set()


def test_a_worker_that_is_lost_again_is_waited_for_again(handler, updates):
    lost = tf.errors.UnavailableError(
        None, None, "Connection reset, /job:worker/replica:0/task:1 was lost"
    )
    updates.errors.append(lost)
    updates.may_end.set()
    PausingRecovery(handler, lambda: True)
    assert handler.lose_a_worker().wait(SECONDS)
    assert not updates.errors and handler._error_from_recovery is None


def test_another_error_is_the_waiting_lanes(handler, updates):
    updates.errors.append(ValueError("no cluster"))
    updates.may_end.set()
    PausingRecovery(handler, lambda: True)
    assert handler.lose_a_worker().wait(SECONDS)
    assert str(handler._error_from_recovery) == "no cluster"


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_function_that_meets_a_worker_on_its_way_back_is_sent_again(is_lost):
    text = "Primary device is not remote" if is_lost else "Shapes do not match"
    error = tf.errors.InvalidArgumentError(None, None, f"{text} [Op:__inference_step_376]")
    assert not cluster_coordinator._is_worker_failure(error)
    found = step_errors.as_loss(error, "/job:worker/replica:0/task:1")
    assert cluster_coordinator._is_worker_failure(found) == is_lost
    assert is_lost or found is error
