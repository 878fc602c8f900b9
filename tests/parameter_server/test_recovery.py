"""Closures of a worker that is lost go to another one, and it is taken back between steps."""

import os
import queue as queues
import threading
import types
from unittest import mock

import pytest
import tensorflow as tf

from keras_psplus.cluster.config import ClusterStartupError
from keras_psplus.parameter_server import scheduler, worker_function
from keras_psplus.parameter_server.queue import (
    Clocks,
    Closure,
    ClosureQueue,
    RemoteWorker,
    WorkerCalls,
)
from keras_psplus.parameter_server.scheduler import Lane, Members, Reconnection, update
from tests.support.tables import for_each

SECONDS = 20
NOTHING = tf.function(lambda: 1).get_concrete_function()
LOST = tf.errors.UnavailableError(None, None, "Reset, /job:worker/replica:0/task:1 was lost")
SERVER = tf.errors.UnavailableError(
    None, None, "GRPC error information from remote target /job:ps/replica:0/task:0: reset"
)


class Scripted(Closure):
    """A closure that, on each worker, does what a list says."""

    def __init__(self, *errors):
        super().__init__(NOTHING, (), "batch 0", lambda result, worker: None)
        self.errors, self.ran_on = list(errors), []
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def run_on(self, calls):
        self.begun.set()
        assert self.may_end.wait(SECONDS)
        self.ran_on.append(calls.worker.index)
        if self.errors:
            raise self.errors.pop(0)
        return "result"


@pytest.fixture
def queue():
    queue = ClosureQueue(2, Clocks(2))
    yield queue
    queue.close()


@pytest.fixture
def updates(monkeypatch):
    """Events: an update has begun, it may end; what it raises; the workers that are in it."""
    state = types.SimpleNamespace(
        begun=threading.Event(), may_end=threading.Event(), errors=[], present=[]
    )

    def update_server_def(definition):
        (job,) = definition.cluster.job
        state.present.append(dict(job.tasks))
        state.begun.set()
        assert state.may_end.wait(SECONDS)
        if state.errors:
            raise state.errors.pop(0)

    context = types.SimpleNamespace(update_server_def=update_server_def)
    definition = types.SimpleNamespace(
        cluster=types.SimpleNamespace(job=[types.SimpleNamespace(name="worker", tasks={0: "a"})])
    )
    stub = types.SimpleNamespace(context=lambda: context, get_server_def=lambda: definition)
    monkeypatch.setattr(scheduler, "context", stub)
    for name in "_SETTLE_SECONDS", "_RETRY_SECONDS", "_ASK_SECONDS":
        monkeypatch.setattr(scheduler, name, 0.01)
    return state


@pytest.fixture
def silent(monkeypatch):
    """Set of the workers that do not respond."""
    silent = set()
    monkeypatch.setattr(
        scheduler.stalls,
        "unresponsive_tasks",
        lambda tasks: [n for n in tasks if int(n) in silent],
    )
    return silent


def lose(queue, worker=1):
    closure = Scripted()
    queue.put(closure, worker)
    assert queue.take(worker) is closure
    queue.lose(closure, queue.losses[worker])
    return closure


def test_a_lost_workers_closures_run_on_another_one(queue, caplog):
    lost, waiting, given = Scripted(LOST), Scripted(), []
    queue.on_lost = given.append
    for closure in (lost, waiting):
        queue.put(closure, 1)
    lost.may_end = threading.Event()
    Lane(RemoteWorker(1), queue)
    assert lost.begun.wait(SECONDS)
    lost.may_end.set()
    with queue.changed:
        assert queue.changed.wait_for(lambda: queue.lost, SECONDS)
    Lane(RemoteWorker(0), queue)
    assert lost.get() == waiting.get() == "result"
    assert lost.ran_on == [1, 0] and waiting.ran_on == [0] and given == [1]
    assert "worker-1 was lost with batch 0; worker-0 takes it once more, and its" in caplog.text


def test_a_server_that_does_not_answer_fails_the_third_step(queue):
    Lane(RemoteWorker(0), queue)
    passing, failing = Scripted(SERVER, SERVER), Scripted(SERVER)
    queue.put(passing, 0)
    assert passing.get() == "result"
    queue.put(failing, 0)
    with pytest.raises(tf.errors.UnavailableError):
        failing.get()
    with pytest.raises(tf.errors.UnavailableError):
        queue.raise_error()


def test_an_error_cancels_the_others_and_the_queue_goes_on(queue):
    failing, waiting = Scripted(ValueError("of a step")), Scripted()
    failing.may_end = threading.Event()
    for closure in (failing, waiting):
        queue.put(closure, 0)
    Lane(RemoteWorker(0), queue)
    assert failing.begun.wait(SECONDS)
    with queue.changed:
        failing.may_end.set()
        assert queue.changed.wait_for(lambda: queue.error is not None, SECONDS)
    with pytest.raises(ValueError, match="of a step"):
        queue.raise_error()
    assert queue.is_empty
    after = Scripted()
    queue.put(after, 0)
    assert after.get() == "result"


def test_steps_of_one_function_overlap(queue):
    """After a first one; those of another function, or without turns, begin when they are over."""
    turns, others = mock.Mock(), mock.Mock()
    groups = [[None], [turns], [turns, turns], [others], [None], [None]]
    closures = [[Scripted() for _ in group] for group in groups]
    for group, of_group in zip(groups, closures):
        for its, closure in zip(group, of_group):
            closure.turns, closure.may_end = its, threading.Event()
            queue.put(closure, 0)
    worker = RemoteWorker(0)
    for _ in range(3):
        Lane(worker, queue)
    for group, after in zip(closures, [*closures[1:], []]):
        assert all(closure.begun.wait(SECONDS) for closure in group)
        assert not any(closure.begun.wait(0.1) for closure in after)
        for closure in group:
            closure.may_end.set()
            assert closure.get() == "result"
    assert [closure.place for group in closures[1:4] for closure in group] == [0, 1, 2, 0]


def test_a_failed_step_lets_the_next_one_go_on(queue):
    turns = mock.Mock()
    closures = [Scripted(), Scripted(SERVER), Scripted(), Scripted()]
    for closure in closures:
        closure.turns = turns
        queue.put(closure, 0)
    _, failing, waiting, after = closures
    failing.may_end, waiting.may_end = threading.Event(), threading.Event()
    worker = RemoteWorker(0)
    with mock.patch.object(WorkerCalls, "run", lambda self, function: function()):
        for _ in range(2):
            Lane(worker, queue)
        assert failing.begun.wait(SECONDS) and waiting.begun.wait(SECONDS)
        assert not turns.release.called
        turns.release.side_effect = waiting.may_end.set
        failing.may_end.set()
        for closure in closures:
            assert closure.get() == "result"
    # The failed one begins anew, alone, when the one that it let go on is over.
    assert failing.place == 0 and {waiting.place, after.place} == {1, 2}


def test_a_worker_is_taken_back_between_closures(queue, updates, silent):
    back = threading.Event()
    silent.add(1)
    Reconnection(queue, Members("ab", lambda name: None), lambda worker: back.set())
    with queue.holding():
        lose(queue)
        # Closures go on for as long as the worker is away ...
        running = queue.take(0)
        with queue.holding():
            silent.clear()
            # ... and what is under way ends before it is taken back.
            assert not updates.begun.wait(0.2)
        queue.end(running)
    assert updates.begun.wait(SECONDS)
    after = Scripted()
    Lane(RemoteWorker(0), queue)
    queue.put(after, 0)
    assert not after.begun.wait(0.1) and not back.is_set()
    updates.may_end.set()
    assert back.wait(SECONDS) and after.begun.wait(SECONDS)
    with queue.changed:
        assert queue.changed.wait_for(lambda: not queue.lost, SECONDS)
    assert queue.losses == [0, 1]


@pytest.mark.parametrize("error", [LOST, ValueError("no cluster")], ids=["lost", "other"])
def test_an_error_while_a_worker_is_taken_back(queue, updates, silent, error):
    """A worker that is lost again is waited for; anything else is an error of the job."""
    updates.errors.append(error)
    updates.may_end.set()
    Reconnection(queue, Members("ab", lambda name: None), lambda worker: None)
    lose(queue)
    with queue.changed:
        assert queue.changed.wait_for(lambda: not queue.lost, SECONDS)
    assert not updates.errors
    assert queue.error is (None if error is LOST else error)


def test_workers_come_that_were_not_there(updates, silent, caplog):
    """Each comes by itself; one that another job has is refused, and one that leaves is not."""
    silent.update((1, 2, 3))
    updates.may_end.set()
    stranger, come = [1], queues.Queue()

    def admit(name):
        if int(name[-1]) in stranger:
            raise ClusterStartupError(f"{name} serves another chief")

    told, let_go = set(), queues.Queue()
    endings = types.SimpleNamespace(is_told_to_end=told.__contains__, let_go=let_go.put)
    queue = ClosureQueue(4, Clocks(4), absent=(1, 2, 3))
    Reconnection(queue, Members("abcd", admit, (1, 2, 3), endings), come.put)
    closure = Scripted()
    queue.put(closure, 1)
    for worker in range(4):
        Lane(RemoteWorker(worker), queue)
    assert closure.get() == "result" and closure.ran_on == [0]
    silent.difference_update((1, 2))
    assert come.get(timeout=SECONDS) == 2
    assert updates.present == [{0: "a", 2: "c"}]
    assert "worker-1 serves another chief" in caplog.text
    stranger.clear()
    assert come.get(timeout=SECONDS) == 1
    assert updates.present[1:] == [{0: "a", 1: "b", 2: "c"}]
    # What it is at ends first, and it is not taken back while it still responds.
    last, waiting = Scripted(), Scripted()
    last.may_end = threading.Event()
    queue.put(last, 2)
    assert last.begun.wait(SECONDS)
    queue.put(waiting, 2)
    told.add("worker-2")
    retired = threading.Thread(target=queue.retire, args=(2,))
    retired.start()
    assert waiting.get() == "result" and waiting.ran_on != [2]
    assert retired.is_alive()
    last.may_end.set()
    retired.join(SECONDS)
    assert last.get() == "result" and last.ran_on == [2] and queue.lost == {2, 3}
    # It ends when TensorFlow has forgotten it, and the next one at its address is taken in at once.
    assert let_go.get(timeout=SECONDS) == "worker-2" and come.empty()
    assert updates.present[2:] == [{0: "a", 1: "b"}]
    told.clear()
    assert come.get(timeout=SECONDS) == 2
    queue.close()


def test_tensorflow_is_not_connected_to_a_worker_that_has_died(updates, silent):
    members = Members("abc", lambda name: None, absent=(1, 2))
    silent.update((1, 2))
    assert members.ready({1, 2}) is None
    silent.clear()
    assert members.ready({1, 2}) == {1, 2}
    silent.add(2)
    with pytest.raises(tf.errors.UnavailableError, match="task:2 does not respond") as raised:
        members.connect(set())
    assert worker_function.is_worker_loss(raised.value) and members.absent == {1, 2}
    assert not updates.present


def test_a_worker_that_does_not_answer_while_tensorflow_connects(
    updates, silent, monkeypatch, caplog
):
    """It is cut off, and calls fail fast meanwhile; if nothing helps, the chief ends."""
    cut, has_ended = [], threading.Event()

    def note_cut(address):
        cut.append((address, os.environ["GRPC_FAIL_FAST"]))
        updates.may_end.set()

    def note_end():
        has_ended.set()
        updates.may_end.set()

    monkeypatch.setenv("GRPC_FAIL_FAST", "use_caller")
    monkeypatch.setattr(scheduler, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(scheduler.step_times, "cut", note_cut)
    monkeypatch.setattr(scheduler.failure, "exit_now", note_end)
    silent.add(1)
    updates.errors.append(LOST)
    with pytest.raises(tf.errors.UnavailableError):
        update({0: "a", 1: "b"})
    assert set(cut) == {("b", "true")} and os.environ["GRPC_FAIL_FAST"] == "use_caller"
    assert "worker-1 does not answer while TensorFlow connects" in caplog.text
    assert not has_ended.is_set()
    monkeypatch.setattr(scheduler, "_GIVE_UP_SECONDS", 0.0)
    updates.may_end.clear()
    update({0: "a", 1: "b"})
    assert has_ended.is_set()
    assert "and TensorFlow still waits for it" in caplog.text


def test_resources_are_made_anew_after_a_loss():
    worker, owner, made = RemoteWorker(0), Scripted(), []

    def make():
        made.append("a resource")
        return made[-1]

    assert worker.resource(owner, make) == worker.resource(owner, make) == "a resource"
    worker.forget()
    worker.resource(owner, make)
    assert len(made) == 2


@for_each("job", ["worker", "ps"])
def test_a_tensor_of_a_forgotten_worker_is_lost_with_it(job):
    text = f"Assigned device '/job:{job}/replica:0/task:0/device:CPU:0' does not match any device"
    known = "the devices available on this machine: [/job:worker/replica:0/task:1/device:CPU:0]"
    error = tf.errors.InternalError(None, None, f"{text}. Here are {known}")
    assert (
        worker_function.is_of_worker(error)
        == worker_function.is_worker_loss(error)
        == (job == "worker")
    )


def test_a_worker_that_is_being_taken_in_is_not_there_yet():
    text = "Client for target /job:worker/replica:0/task:1 not found. [Op:VarIsInitializedOp]"
    error = tf.errors.InvalidArgumentError(None, None, text)
    assert worker_function.is_of_worker(error) and not worker_function.is_server_loss(error)


@for_each("is_lost", [True, False])
def test_a_function_that_meets_a_worker_on_its_way_back_is_sent_again(is_lost):
    text = "Primary device is not remote" if is_lost else "Shapes do not match"
    error = tf.errors.InvalidArgumentError(None, None, f"{text} [Op:__inference_step_376]")
    assert not worker_function.is_worker_loss(error)
    found = worker_function.as_loss(error, "/job:worker/replica:0/task:1")
    assert worker_function.is_worker_loss(found) == is_lost
    assert is_lost or found is error
