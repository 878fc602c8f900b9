"""The arguments that decide when workers wait for one another."""

import threading
import types

import pytest
from tensorflow.python.distribute.coordinator import cluster_coordinator

import keras_psplus as psp
from keras_psplus.parameter_server import modes
from keras_psplus.parameter_server.scheduling.closures import Closure
from keras_psplus.parameter_server.scheduling.scheduler import Scheduler
from keras_psplus.parameter_server.steps.clocks import Clocks
from keras_psplus.parameter_server.sync.step_attempts import Attempt, StepAttempts

CLUSTER = """{"cluster": {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"],
"ps": ["127.0.0.1:4"]}, "task": {"type": "ps", "index": 0}}"""


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "synchronous"},
        {"mode": None},
        {"mode": "sync", "backup_workers": -1},
        {"mode": "sync", "backup_workers": 0.5},
        {"mode": "sync", "backup_workers": True},
        {"backup_workers": 1},
        {"max_staleness": -1},
        {"max_staleness": 1.0},
        {"max_staleness": False},
        {"mode": "sync", "max_staleness": 0},
        # There are two workers.
        {"mode": "sync", "backup_workers": 2},
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_starts(arguments, monkeypatch):
    # In a server, where the constructor would not return.
    monkeypatch.setenv("TF_CONFIG", CLUSTER)
    name = list(arguments)[-1]
    with pytest.raises(ValueError, match=rf"Received: .*{name}={arguments[name]!r}"):
        psp.ParameterServerStrategy(**arguments)


def test_good_arguments():
    assert modes.check_mode("async", 0, None) == modes.Mode(False, 0, None)
    assert modes.check_mode("async", 0, 0).max_staleness == 0
    mode = modes.check_mode("sync", 2, None)
    assert mode.is_sync
    mode.check_workers(3)


def test_the_first_gradients_of_an_attempt_count():
    attempts = StepAttempts(num_workers=3, backup_workers=1)
    attempt = attempts.begin(shares=3)
    assert attempt.admit(2)
    assert attempt.admit(0)
    assert not attempt.admit(1)
    attempt.finish(2, "two")
    assert not attempt.is_over
    attempt.finish(0, "zero")
    assert attempt.is_over
    assert not attempt.is_void
    attempts.count(attempt, shares=3)
    assert attempts.dropped == 1
    assert attempts.begin(shares=3).stamp > attempt.stamp
    # A last batch may have fewer rows than there are workers.
    assert attempts.begin(shares=1).wanted == 1


def test_an_attempt_is_void_once_an_admitted_share_is_computed_again():
    attempt = Attempt(stamp=1, wanted=2)
    assert attempt.admit(0)
    assert not attempt.admit(0)
    assert attempt.is_void
    assert attempt.is_over
    assert not attempt.admit(1)


def test_many_threads_ask_and_few_are_admitted():
    attempt = Attempt(stamp=1, wanted=3)
    admitted = []
    threads = [
        threading.Thread(target=lambda share=share: admitted.append(attempt.admit(share)))
        for share in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(admitted) == 3


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_clocks_hold_a_worker_that_is_ahead(bound):
    clocks = Clocks(num_workers=2, bound=bound)
    given = [clocks.give(), clocks.give()]
    assert sorted(given) == [0, 1]
    begun = 1
    for _ in range(10):
        # Worker 0 is fast, and worker 1 does not come to an end.
        clocks.finish(0)
        while clocks.is_free:
            begun += clocks.give() == 0
    assert begun == bound + 1
    clocks.finish(1)
    assert clocks.is_free


def test_a_lost_worker_holds_up_nobody_and_comes_back_where_the_slowest_is():
    clocks = Clocks(num_workers=2, bound=1)
    assert {clocks.give(), clocks.give()} == {0, 1}
    clocks.lose(1)
    clocks.move(1, 0)
    clocks.finish(0)
    clocks.finish(0)
    for _ in range(8):
        assert clocks.give() == 0
        clocks.finish(0)
    clocks.welcome(1)
    assert {clocks.give(), clocks.give()} == {0, 1}
    clocks.lose(0)
    clocks.lose(1)
    assert not clocks.is_free
    clocks.welcome(0)
    assert clocks.is_free


def test_a_worker_whose_step_is_taken_back_after_its_loss_gets_no_other():
    queue = cluster_coordinator._CoordinatedClosureQueue()
    cluster = types.SimpleNamespace(closure_queue=queue, workers=[])
    scheduler = Scheduler(types.SimpleNamespace(_cluster=cluster), 3, lambda: None)

    def start():
        closure = Closure.__new__(Closure)
        closure._output_type_spec = None
        scheduler.start(closure, lambda result, worker: None, "batch 0", home=2)
        return closure

    first = start()
    assert queue.get(tag=2) is first
    scheduler.note_start(first, 2)
    # Worker 2 is lost with it. Before anyone takes it, the step begins anew for another worker's
    # sake.
    queue.put_back(first)
    scheduler.withdraw([first])
    second = start()
    assert queue.get(timeout=1, tag=0) is second


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sync", "backup_workers": 1},
        {"max_staleness": 2},
        {"updates": "accumulate:2"},
        {"updates": "local_sgd:2"},
    ],
)
def test_steps_that_go_on_from_one_another_cannot_overlap(options):
    with pytest.raises(
        ValueError, match="`overlap_steps` goes without .*Received: overlap_steps=True"
    ):
        psp.ParameterServerStrategy(overlap_steps=True, **options)
