"""Parts that decide which worker takes which step, and when workers wait for one another."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.parameter_server.context import Attempt, StepAttempts
from keras_psplus.parameter_server.queue import Clocks, Closure, ClosureQueue
from keras_psplus.parameter_server.scheduler import Scheduler
from keras_psplus.parameter_server.sync_steps import split
from tests.support.tables import for_each

# Steps that keep a worker busy.
WINDOW = 2


def test_shares_have_rows():
    ((weight, part),) = split((tf.ones([1, 2]), tf.ones([1])), 2)
    assert weight == 1.0 and part[0].shape == (1, 2)
    # Or there would be no step.
    batch = tf.ones([0, 2]), tf.ones([0])
    ((weight, part),) = split(batch, 2)
    assert weight == 1.0 and part is batch


def test_the_first_gradients_of_an_attempt_count():
    attempts = StepAttempts(backup_workers=1)
    attempt = attempts.begin(shares=3, workers=3)
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
    assert attempts.begin(shares=3, workers=3).stamp > attempt.stamp
    # A last batch may have fewer rows than there are workers, which may be fewer than at first.
    assert attempts.begin(shares=1, workers=3).wanted == 1
    assert attempts.begin(shares=1, workers=1).wanted == 1


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


def give(clocks):
    worker = clocks.free(WINDOW)[0]
    clocks.give(worker)
    return worker


@for_each("bound", [0, 1, 4])
def test_clocks_hold_a_worker_that_is_ahead(bound):
    clocks = Clocks(num_workers=2)
    clocks.begin(bound)
    given = [give(clocks), give(clocks)]
    assert sorted(given) == [0, 1]
    begun = 1
    for _ in range(10):
        # Worker 0 is fast, and worker 1 does not come to an end.
        clocks.finish(0)
        while clocks.free(WINDOW):
            begun += give(clocks) == 0
    assert begun == bound + 1
    assert clocks.slower(0) is None
    clocks.finish(1)
    assert clocks.free(WINDOW)


def test_a_lost_worker_holds_up_nobody_and_comes_back_where_the_slowest_is():
    clocks = Clocks(num_workers=2)
    clocks.begin(1)
    assert {give(clocks), give(clocks)} == {0, 1}
    clocks.lose(1)
    clocks.move(1, 0)
    clocks.finish(0)
    clocks.finish(0)
    for _ in range(8):
        assert give(clocks) == 0
        clocks.finish(0)
    clocks.welcome(1)
    assert {give(clocks), give(clocks)} == {0, 1}
    clocks.lose(0)
    clocks.lose(1)
    assert not clocks.free(WINDOW)
    clocks.welcome(0)
    assert clocks.free(WINDOW)


def simulated(steps, seconds, noise=0.0, seed=0):
    """Steps by worker, and the seconds of all, with a queue for each worker."""
    random = np.random.default_rng(seed)
    clocks, done = Clocks(len(seconds)), [0] * len(seconds)
    clocks.begin()
    queued, ends, now = [0] * len(seconds), {}, 0.0
    while steps or ends or any(queued):
        while steps and clocks.free(WINDOW):
            queued[give(clocks)] += 1
            steps -= 1
        for worker, count in enumerate(queued):
            if count and worker not in ends:
                queued[worker] -= 1
                ends[worker] = now + seconds[worker] * (1 + noise * random.uniform(-1, 1))
        worker = min(ends, key=ends.get)
        now = ends.pop(worker)
        done[worker] += 1
        clocks.finish(worker)
        slower = clocks.slower(worker) if not steps else None
        if slower is not None and queued[slower]:
            clocks.move(slower, worker)
            queued[slower] -= 1
            queued[worker] += 1
    return done, now


@for_each("steps", [1, 2, 3, 7, 80, 81, 200])
@for_each("workers", [1, 2, 4])
def test_equally_fast_workers_take_as_many_steps(steps, workers):
    for seed in range(10):
        done, _ = simulated(steps, [1.0] * workers, 0.2, seed)
        assert sum(done) == steps
        assert max(done) - min(done) <= 1


@for_each("seconds", [[1.0, 3.0], [1.0, 1.0, 2.0], [1.0, 10.0]])
def test_slower_workers_take_fewer_steps_and_hold_up_nobody(seconds):
    done, now = simulated(400, seconds, 0.1)
    speeds = 1 / np.array(seconds)
    np.testing.assert_allclose(done, 400 * speeds / speeds.sum(), atol=7)
    # All but the step that a slower one is at work on.
    assert now <= 400 / speeds.sum() + 1.2 * max(seconds)


def waiting_closure(about, counts_for=None):
    closure = Closure(None, (), about, lambda result, worker: None)
    closure.home = counts_for
    return closure


def test_an_error_ends_steps_that_follow_a_lost_workers_in_the_queue():
    scheduler = Scheduler(0, lambda last_end: None, None)
    queue = ClosureQueue(2, Clocks(2))
    scheduler.queue = queue
    closures = [waiting_closure(f"batch {i}", home) for i, home in enumerate((1, 1, 1, 0))]
    for closure, place in zip(closures, (1, 1, 1, None)):
        queue.put(closure, place)
    queue.fail(ValueError("of a step"))
    with pytest.raises(ValueError, match="of a step"):
        scheduler.join()
    assert queue.is_empty
    for closure in closures:
        with pytest.raises(tf.errors.CancelledError, match=closure.about):
            closure.get()


def test_a_worker_whose_step_is_taken_back_after_its_loss_gets_no_other(caplog):
    queue = ClosureQueue(3, Clocks(3))
    first, second = waiting_closure("share 2"), waiting_closure("share 2, again")
    queue.put(first, 2)
    assert queue.take(2) is first
    queue.lose(first, 0)
    # Before anyone takes it, the step begins anew for another worker's sake.
    queue.withdraw([first])
    assert "worker-2 was lost; other workers take its steps" in caplog.text
    queue.put(second, 2)
    assert queue.take(0) is second and queue.losses == [0, 0, 1]
