"""What is said to be waited for, by what is known of the others."""

import re
import time
import types

import pytest
import tensorflow as tf

from keras_psplus.all_reduce.liveness import NO_DATA, RUNNING, TRACING, StallProbe, StepMarks
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.hybrid.servers import StallProbe as HybridStallProbe
from keras_psplus.parameter_server.scheduler import StallProbe as ChiefStallProbe

TASK = TaskConfig({"worker": ("a:1", "a:2"), "ps": ("a:3", "a:4")}, "worker", 0)


@pytest.fixture
def silent(monkeypatch):
    """Names of the tasks that do not answer."""
    names = set()
    monkeypatch.setattr(
        stalls,
        "unresponsive_tasks",
        lambda addresses: [name for name in addresses if name in names],
    )
    return names


def hybrid(pushes, sync=True):
    world = types.SimpleNamespace(rank=0, local_replicas=1)
    servers = types.SimpleNamespace(peers=[("ps-0", "a:3"), ("ps-1", "a:4")], pushes=lambda: pushes)
    marks = types.SimpleNamespace(state="has its batch")
    waits = HybridStallProbe(TASK, Progress(), marks, world, sync, lambda: servers)
    waits._state_of = lambda name, entered: None
    return waits.describe(7)


def test_a_worker_names_the_server_of_a_table(silent):
    silent.add("ps-1")
    assert hybrid([[3, 3]]) == "a table; not arrived: ps-1 (no answer)"


def test_a_worker_names_those_that_have_not_pushed(silent):
    assert hybrid([[3, 3], [3, 2]]) == "the barrier of the tables; not arrived: worker-1"
    assert hybrid([[3, 3], [2, 3]]) == "a collective; not arrived: worker-1"
    assert hybrid([[3, 2]], sync=False) == "a collective; not arrived: worker-1"
    silent.add("worker-1")
    assert hybrid([[3, 2]]).endswith("not arrived: worker-1 (no answer)")


@pytest.mark.parametrize(
    "other, line",
    [
        (None, "worker-1"),
        (NO_DATA, "none; worker-0 has its batch, worker-1 waits for its data"),
        (TRACING, "none; worker-0 has its batch, worker-1 traces its step"),
        (RUNNING, "none; all workers have their batches and have not finished the step: .*"),
    ],
)
def test_where_workers_are_that_have_all_come(silent, other, line):
    waits = StallProbe(TASK, Progress(), types.SimpleNamespace(state=RUNNING))
    waits._state_of = lambda name, entered: other
    assert re.fullmatch(f"a collective; not arrived: {line}", waits.describe(7))


def test_a_worker_posts_where_it_is_once_and_when_that_changes(silent):
    progress, marks, posts = Progress(), types.SimpleNamespace(state=NO_DATA), []
    waits = StallProbe(TASK, progress, marks)
    waits._call_in_thread = lambda method, entered, *text: posts.append((entered, *text))
    progress.begin("training step")
    for state in (NO_DATA, NO_DATA, NO_DATA, RUNNING, RUNNING):
        marks.state = state
        waits.look()
    progress.end()
    progress.begin("training step")
    waits.look()
    assert posts == [(1, NO_DATA), (1,), (1, RUNNING), (1,)]


def test_a_step_counts_its_batch_when_it_has_come_and_when_it_is_done():
    marks = StepMarks()
    assert marks.state == TRACING

    @tf.function
    def step(batch, fails):
        with marks.tracing():
            states.append(marks.state)
            marks.received("/cpu:0", batch)
            with tf.control_dependencies([tf.debugging.Assert(~fails, ["stops here"])]):
                marks.finished("/cpu:0", tf.identity(batch))

    states = []
    step(tf.constant(1.0), tf.constant(False))
    assert states == [TRACING]
    assert marks.state == NO_DATA
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(1.0), tf.constant(True))
    assert marks.state == RUNNING


def chief(*closures):
    progress = Progress()
    waits = ChiefStallProbe(
        types.SimpleNamespace(closures=closures, lost=()),
        progress,
        {"worker": ["a:1", "a:2"], "ps": ["a:3"]},
    )
    return progress, waits


def closure(worker, started):
    return types.SimpleNamespace(about="batch 3", tried_on=worker, started=started)


def test_the_chief_names_the_worker_or_the_server_that_holds_it_up(silent):
    _, waits = chief(closure(1, 5.0), closure(None, None))
    ((wait,),) = [waits.look().values()]
    assert (wait.what, wait.since) == ("chief-0 at batch 3", 5.0)
    assert wait.describe().endswith(
        "not arrived: worker-1, which answers: it is slow, or has no data"
    )
    silent.add("ps-0")
    assert wait.describe().endswith("worker-1, which is held up by ps-0 (no answer)")
    silent.add("worker-1")
    assert "not arrived: worker-1 (no answer; end its process" in wait.describe()


def test_of_a_workers_closures_the_oldest_is_waited_for(silent):
    _, waits = chief(closure(1, 6.0), closure(1, 5.0), closure(0, 7.0), closure(1, 8.0))
    assert sorted(wait.since for wait in waits.look().values()) == [5.0, 7.0]


def test_a_server_that_answers_late_is_named(monkeypatch):
    seconds = {"a:1": 0.0, "a:2": 0.0, "a:3": 0.3}
    monkeypatch.setattr(
        stalls.handshake, "grpc_responds", lambda a, timeout: time.sleep(seconds[a]) or True
    )
    _, waits = chief(closure(1, 5.0))
    ((wait,),) = [waits.look().values()]
    # Of two tasks, one of which takes that long, the other is the usual one.
    assert "not arrived: worker-1; slow: ps-0 (answers after 0." in wait.describe()
    seconds["a:3"] = 0.0
    assert wait.describe().endswith("worker-1, which answers: it is slow, or has no data")


def test_a_call_of_the_chief_itself_is_logged_if_no_closure_is(silent):
    progress, waits = chief()
    assert waits.look() == {}
    progress.count(3)
    progress.begin("training step")
    ((wait,),) = [waits.look().values()]
    silent.add("worker-1")
    assert wait.what == "chief-0 at training step 4"
    assert wait.describe() == "an answer; not arrived: worker-1 (no answer)"
    progress.end()
    assert waits.look() == {}


def test_what_is_tried_anew_is_another_wait(silent):
    one = closure(0, 5.0)
    _, waits = chief(one)
    before = waits.look()
    one.started = 6.0
    assert not set(before) & set(waits.look())
