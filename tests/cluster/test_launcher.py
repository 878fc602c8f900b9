"""Ends of clusters, and starts of tasks and jobs again: the launcher over simulated processes."""

import json
import os
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_psplus.cli import main
from keras_psplus.cluster import processes
from keras_psplus.cluster.environment import plan_tasks
from keras_psplus.cluster.launcher import task_ends
from keras_psplus.cluster.launcher.task_ends import ADD_WORKER, ClusterResult, TaskRestarts
from keras_psplus.cluster.monitor import job
from keras_psplus.cluster.monitor.job import JobRecord
from tests.cluster.simulated import POLL, Launcher, Life
from tests.support.clock import few
from tests.support.tables import for_each

_POLLS = 2 * POLL


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    return Launcher(monkeypatch, tmp_path)


def ends(seconds, code=0):
    return [Life(seconds, code)]


DEAF = [Life(at_sigterm=None)]
SERVED = {"chief": True, "workers": 2, "ps": 1}
# A row: options, where `served` is a chief with two workers and a server, and two workers are the
# rest; lives of tasks, of so many seconds with an exit code, or a signal; and the end: exit code,
# task that failed first, seconds until then, and the tasks that the launcher has ended.
ENDS = """
failure_grace=5                       | worker-1 3 7                            | 7 worker-1 3+5 worker-0
                                      | worker-0 1 0, worker-1 3 0              | 0 - 3

# Others have time to report a failure, and less if the task said itself what was wrong.
failure_grace=20                      | worker-0 4 1, worker-1 1 1              | 1 worker-1 4
failure_grace=50 error_grace=2        | worker-1 1 1                            | 1 worker-1 1+2 worker-0
failure_grace=50 error_grace=2        | worker-0 30 0, worker-1 1 -9            | 137 worker-1 30

# What computes has the whole grace; what only serves that ends soon after it.
ps=1 failure_grace=50 idle_grace=2    | worker-0 1 1, worker-1 9 0              | 1 worker-0 9+2 ps-0
served idle_grace=2                   | chief-0 1 1                             | 1 chief-0 1+2 worker-0 worker-1 ps-0

kill_grace=4 timeout=10               | worker-0 deaf, worker-1 9 0             | 124 - 10+4 worker-0
ps=1 server_grace=6                   | worker-0 1 0, worker-1 1 0              | 0 - 1+6 ps-0
ps=1 server_grace=6                   | worker-0 1 0, worker-1 1 0, ps-0 3 0    | 0 - 3

# Workers that serve a chief have a time of their own.
served server_grace=1 worker_grace=30 | chief-0 1 0, worker-0 20 0, worker-1 2 0 | 0 - 20+1 ps-0
served server_grace=1 worker_grace=30 | chief-0 1 0                             | 0 - 1+30 worker-0 worker-1 ps-0

# A server, or a worker that serves, may be killed after a good end, and not after a bad one.
served                                | chief-0 1 0, ps-0 2 -9, worker-0 3 0, worker-1 3 0 | 0 - 3
ps=1                                  | worker-0 1 0, ps-0 2 -15, worker-1 3 0  | 0 - 3
served failure_grace=9                | chief-0 1 3, ps-0 2 -9, worker-0 3 0, worker-1 3 0 | 3 chief-0 3
served failure_grace=1                | ps-0 2 -9                               | 137 ps-0 2+1 chief-0 worker-0 worker-1
served                                | chief-0 3 0, worker-0 3 0, worker-1 2 -9, ps-0 3 0 | 0 worker-1 3
                                      | worker-0 3 0, worker-1 2 -9             | 137 worker-1 3

# An evaluator has time for the last checkpoint; its failure is none of the job's.
evaluator=1                           | worker-0 3 0, worker-1 3 0, evaluator-0 9 0 | 0 - 9
evaluator=1                           | worker-0 3 0, worker-1 3 0, evaluator-0 1 3 | 0 - 3
evaluator=1 evaluator_grace=20        | worker-0 3 0, worker-1 3 0              | 0 - 3+20 evaluator-0

# Of a range, too few workers are left.
served min_workers=1 failure_grace=1  | worker-0 2 -9                           | 137 worker-0 2+1 chief-0 ps-0
"""  # noqa: E501


def options_of(text):
    options = {"workers": 2} | (SERVED if "served" in text else {})
    pairs = (word.split("=") for word in text.split() if "=" in word)
    return options | {name: int(value) for name, value in pairs}


def lives_of(text):
    lives = {}
    for name, *life in (part.split() for part in text.split(",")):
        lives.setdefault(name, []).extend(DEAF if life == ["deaf"] else ends(*map(int, life)))
    return lives


def rows_of(table):
    lines = [line for line in table.splitlines() if line and not line.startswith("#")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize(("options", "lives", "end"), rows_of(ENDS))
def test_the_end_of_a_cluster(options, lives, end, launcher):
    options, lives = options_of(options), lives_of(lives)
    code, first_failure, seconds, *terminated = end.split()
    result, took = launcher.run(lives, **options)
    assert result.exit_code == int(code) and result.terminated == tuple(terminated)
    assert result.first_failure == (None if first_failure == "-" else first_failure)
    assert result.timed_out == (code == "124")
    expected = sum(map(int, seconds.split("+")))
    assert expected <= took <= expected + _POLLS
    chief = "chief-0" if options.get("chief") else "worker-0"
    number = -lives["ps-0"][0].code if "ps-0" in lives else 0
    said = f"ps-0 has ended (ended by signal {number}) after {chief} has ended well: no failure"
    assert (f"keras-psplus: {said}" in launcher.lines) == (number > 0 and code == "0")
    # The end of its input tells an evaluator that training has ended.
    is_told = "evaluator" in options and expected > 3
    assert ("evaluator-0" in launcher.processes[0].closed) == is_told


def test_who_was_ended_for_want_of_memory_is_named(launcher, monkeypatch, tmp_path):
    statistics = tmp_path / "vmstat"
    statistics.write_text("pgfault 1\noom_kill 3\n")
    monkeypatch.setattr(task_ends, "_STATISTICS", statistics)
    launcher.clock.after(1, lambda: statistics.write_text("oom_kill 4"))
    result, _ = launcher.run({"worker-1": ends(1, -9)})
    assert result.how_it_failed == "ended by signal 9, by the kernel for want of memory"
    assert result.exit_code == 137
    # Another end by this signal is not.
    assert launcher.run({"worker-1": ends(1, -9)})[0].how_it_failed == "ended by signal 9"


def test_others_that_have_said_what_they_saw_are_not_waited_for(launcher, tmp_path):
    with JobRecord(["script.py"], {"worker": 3}, tmp_path) as record:
        for i in range(2):
            failed = lambda name=f"worker-{i}": job.mark_failed(record.folder, name)  # noqa: E731
            launcher.clock.after(4 + i, failed)
        options = {"workers": 3, "failure_grace": 90, "kill_grace": 90, "record": record}
        result, seconds = launcher.run({"worker-2": ends(1, -9), "worker-0": DEAF}, **options)
        assert result.exit_code == 137 and 5 <= seconds <= 5 + _POLLS
        # Nor asked to end, which TensorFlow would not hear.
        assert set(result.exit_codes.values()) == {-signal.SIGKILL}
        # The next attempt has not said anything.
        assert record.have_failed(["worker-0", "worker-1"])
        record.begin_attempt(1)
        assert not record.have_failed(["worker-0"])


def test_who_only_serves_is_not_waited_for_when_the_chief_has_failed(launcher, tmp_path):
    with JobRecord(["script.py"], {"chief": 1, "worker": 1}, tmp_path) as record:
        launcher.clock.after(1, lambda: job.mark_serving(record.folder, "worker-0"))
        options = {"workers": 1, "chief": True, "failure_grace": 90, "idle_grace": 1}
        lives = {"chief-0": ends(2, 1), "worker-0": DEAF}
        result, seconds = launcher.run(lives, record=record, kill_grace=90, **options)
        assert result.exit_codes == {"chief-0": 1, "worker-0": -signal.SIGKILL}
        assert 3 <= seconds <= 3 + _POLLS
        record.begin_attempt(1)
        assert not record.is_serving("worker-0")


@pytest.mark.parametrize(("takes", "saved"), [(6, True), (20, False)])
def test_a_launcher_that_is_told_to_end_lets_those_that_train_save(launcher, takes, saved):
    saves = [Life(at_sigterm=(takes, 143))]
    with launcher.cluster({"worker-0": saves, "worker-1": saves[:]}, ps=1, grace=10) as cluster:
        launcher.clock.after(1, lambda: cluster._signals.received.append(signal.SIGTERM))
        result = cluster.wait()
    assert (result.signal, result.exit_code, result.first_failure) == (15, 143, None)
    codes = {result.exit_codes[f"worker-{i}"] for i in range(2)}
    assert codes == {143 if saved else -signal.SIGKILL}
    said = "keras-psplus: worker-0, worker-1 ended before saving (--grace=10)"
    assert (said in launcher.lines) != saved
    # A server is told only then.
    told = [name for name, _ in launcher.processes[0].signals]
    assert told.index("ps-0") > max(told.index("worker-0"), told.index("worker-1"))


def test_result_of_a_task_that_never_started():
    result = ClusterResult({}, {})
    assert (result.exit_code, result.how_ended("worker-0")) == (0, "not started")


def test_threads_are_split_unless_the_user_says_otherwise(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("keras_psplus.cluster.environment.available_cores", lambda: 12)
    (first, *_, ps) = plan_tasks(workers=3, ps=1)
    assert first.variables["OMP_NUM_THREADS"] == ps.variables["TF_NUM_INTRAOP_THREADS"] == "4"
    (first, *_) = plan_tasks(workers=24)
    assert first.variables["TF_NUM_INTRAOP_THREADS"] == "1"
    assert first.variables["TF_NUM_INTEROP_THREADS"] == "2"
    (first, *_) = plan_tasks(workers=3, environ={"OMP_NUM_THREADS": "7"})
    assert "OMP_NUM_THREADS" not in first.variables


def test_hosts_get_default_ports():
    hosts = ["a", "b:99", "b", "b", "[::1]"]
    tasks = plan_tasks(workers=3, ps=1, chief=True, hosts=hosts)
    addresses = [task.config.address for task in tasks]
    assert addresses == ["a:2222", "b:99", "b:2222", "b:2223", "[::1]:2222"]
    assert all(set(task.variables) == {"TF_CONFIG"} for task in tasks)


@for_each(
    "kwargs, message",
    [
        ({"workers": 0}, "at least one worker"),
        ({"workers": -1, "chief": True}, "at least one worker"),
        ({"workers": 2, "hosts": ["a"]}, "2 tasks .*Received: hosts=a"),
        ({"workers": 2, "hosts": ["a:1", "a:1"]}, "same|Two tasks"),
    ],
)
def test_impossible_clusters_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan_tasks(**kwargs)


# A row: options; lives of tasks, one after the other; restarts that there may be; and what comes of
# it: the exit code, the numbers of the job's starts, and how often some tasks were started.
JOBS = """
# A killed worker is started again, and the others go on, until no restart is left.
served       | chief-0 9 0, worker-0 1 -9, worker-0 5 0, worker-1 9 0 | 1 | 0 [0] chief-0 1 worker-0 2 worker-1 1
served       | worker-0 1 3                               | 1 | 3 [0] worker-0 2 ps-0 1
# Two that fail at one time, of which one restart would be too few.
served       | chief-0 9 0, worker-0 1 -9, worker-0 5 0, worker-1 1 -9, worker-1 5 0 | 1 | 0 [0,1] chief-0 2 worker-0 2 worker-1 2
served       | chief-0 9 0, worker-0 1 -9, worker-0 5 0, worker-1 1 -9, worker-1 5 0 | 2 | 0 [0] chief-0 1 worker-0 2 worker-1 2
# A chief that fails is the job's restart: the second, if a worker had one before.
served       | chief-0 9 1, chief-0 9 0, worker-0 1 -9, worker-0 5 0 | 2 | 0 [0,2] chief-0 2 worker-0 3
# A wrong command line is not tried again.
served       | worker-1 1 2                               | 3 | 2 [0] worker-1 1
# The whole job where that is asked for.
served tasks_alone=0 | chief-0 9 0, worker-0 1 -9, worker-0 5 0 | 1 | 0 [0,1] worker-0 2 worker-1 2
# Without a chief, servers are started again alone if that is asked for; workers never.
ps=1 server_restarts=1 | ps-0 1 -9, ps-0 5 0, worker-0 9 0, worker-1 9 0 | 1 | 0 [0] ps-0 2 worker-1 1
ps=1         | ps-0 1 -9, ps-0 5 0, worker-0 9 0, worker-1 9 0 | 1 | 0 [0,1] ps-0 2 worker-1 2
ps=1 server_restarts=1 | worker-0 1 -9, worker-0 5 0, worker-1 9 0 | 1 | 0 [0,1] ps-0 2 worker-0 2
# Training that went on without a worker is not done again.
served tasks_alone=0 | chief-0 2 0, worker-0 3 1, worker-1 4 0 | 2 | 1 [0] worker-0 1
"""  # noqa: E501


@pytest.mark.parametrize(("options", "lives", "most", "end"), rows_of(JOBS))
def test_what_is_started_again(options, lives, most, end, launcher):
    code, numbers, *counts = end.split()
    lives, most = lives_of(lives), int(most)
    result, made = launcher.run_job(lives, most, **options_of(options), server_grace=1)
    assert (result.exit_code, made) == (int(code), json.loads(numbers))
    started = [task for each in launcher.processes for task, _ in each.starts]
    for task, count in zip(counts[::2], counts[1::2]):
        assert started.count(task) == int(count)
    # Each is told how often the job, or a task of it, was started before.
    told = [number for each in launcher.processes for _, number in each.starts]
    assert told == sorted(told) and told[-1] == (most if len(started) > len({*started}) else 0)


def test_what_is_said_of_restarts(launcher):
    launcher.run_job({"worker-0": ends(1, 3)}, 1, **SERVED)
    assert "worker-0 has failed (exit code 3); no restart of 1 is left" in launcher.lines
    launcher.run_job({"chief-0": [Life(1, 1), Life(1)]}, 2, **SERVED)
    assert "chief-0 has failed (exit code 1); restart 1 of 2 begins in 1 s" in launcher.lines
    lives = {"chief-0": ends(2), "worker-0": ends(3, 1), "worker-1": ends(4)}
    launcher.run_job(lives, 2, tasks_alone=False, **SERVED)
    assert "worker-0 has failed, but the chief has ended well: no restart" in launcher.lines


def test_pauses_grow_for_a_job_that_fails_at_once(launcher):
    lives = lives_of("worker-1 1 -9, worker-1 1 -9, worker-1 99 -9, worker-1 1 -9")
    result, numbers = launcher.run_job(lives, 3, workers=2, failure_grace=0)
    assert result.exit_code == 137 and numbers == [0, 1, 2, 3]
    failed = "worker-1 has failed (ended by signal 9)"
    assert [line for line in launcher.lines if line.startswith(failed) and ";" in line] == [
        f"{failed}; restart 1 of 3 begins in 1 s",
        f"{failed}; restart 2 of 3 begins in 2 s",
        f"{failed}; restart 3 of 3 begins in 0 s",
        f"{failed}; no restart of 3 is left",
    ]


def test_pauses_grow_for_a_task_that_fails_at_once(launcher):
    tasks, clock = TaskRestarts(4, launcher.note), launcher.clock
    for pause in (1, 2, 4):
        tasks.take("worker-0", -9, clock.now)
        assert "worker-0" in tasks and not tasks.pop_due()
        clock.sleep(pause)
        assert tasks.pop_due() == ["worker-0"]
    tasks.take("worker-0", -9, clock.now - 31)
    assert tasks.pop_due() == ["worker-0"]
    assert not tasks.can_take({"worker-0": -9})
    failed = "worker-0 has failed (ended by signal 9), and the others go on"
    assert launcher.lines[1] == f"{failed}; restart 2 of 4 begins in 2 s"
    assert not any(TaskRestarts(3, print).can_take({name: -9}) for name in ("chief-0", "ps-0"))


@pytest.mark.parametrize(
    "options",
    [{"signal": 2}, {"signal": 15}, {"timed_out": True}],
    ids=["Ctrl-C", "SIGTERM", "time-out"],
)
def test_other_ends_are_final(options):
    class Attempt:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait(self, timeout):
            return ClusterResult({"worker-0": 1}, {}, "worker-0", **options)

    made, lines = [], []
    processes.run(lambda restart: made.append(restart) or Attempt(), 3, log=lines.append)
    assert made == [0] and lines == []


def ask_for_workers(launcher, record, *seconds):
    """Asks for a worker at some times; returns the files of the answers."""
    requests = [record.folder / f"{ADD_WORKER}-{i}.request" for i in range(len(seconds))]
    for when, request in zip(seconds, requests):
        launcher.clock.after(when, request.touch)
    return [request.with_suffix(".answer") for request in requests]


def test_workers_come_and_go(launcher, tmp_path):
    lives = {"chief-0": ends(20), "worker-0": [Life(6, -9), Life()]}
    with JobRecord(["task.py"], {"worker": 2}, tmp_path, min_workers=1) as record:
        answers = ask_for_workers(launcher, record, 2, 4, 8)
        options = {"record": record, "min_workers": 1, **SERVED}
        result, _ = launcher.run(lives, **options)
        added, refused, again = (answer.read_text() for answer in answers)
    assert "worker-1" in added and "worker-0" in again
    assert "has all 2 workers of its range already" in refused and "Received: " in refused
    assert (result.exit_code, result.first_failure) == (0, None)
    starts = ["chief-0", "worker-0", "ps-0", "worker-1", "worker-0"]
    assert [name for name, _ in launcher.processes[0].starts] == starts
    left = "keras-psplus: worker-0 has left (ended by signal 9), and 1 go on"
    assert launcher.lines.count(left) == 1
    # What the one that has left had started ends before it is started again.
    assert launcher.processes[0].signals[0] == ("worker-0", signal.SIGKILL)


def test_a_job_without_a_range_takes_no_worker(tmp_path, capsys):
    with JobRecord(["task.py"], {"worker": 1}, tmp_path):
        assert main.main(["add-worker", str(os.getpid())]) == 2
        assert "has a fixed number of workers" in capsys.readouterr().err
    assert main.main(["add-worker", "1"]) == 2
    assert "jobs that take workers: none. Received: 1" in capsys.readouterr().err


LIVES = st.lists(
    st.builds(
        Life,
        st.sampled_from([0.0, 1.0, 7.0, 40.0]),
        st.sampled_from([0, 0, 1, 2, 3, -9, -15]),
        st.sampled_from([None, (0.0, -15), (2.0, 143), (300.0, 143)]),
    ),
    min_size=1,
    max_size=3,
)
LAYOUTS = st.fixed_dictionaries(
    {"workers": st.integers(1, 3), "ps": st.integers(0, 2), "chief": st.booleans()},
    optional={"evaluator": st.just(True)},
)
ALONE = st.fixed_dictionaries({"tasks_alone": st.booleans(), "server_restarts": st.booleans()})


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), LAYOUTS, st.integers(0, 3), ALONE)
def test_every_job_ends(launcher, data, layout, most, alone):
    lives = {task.name: data.draw(LIVES) for task in plan_tasks(**layout)}
    launcher.processes.clear()
    launcher.clock.now = 0.0
    result, numbers = launcher.run_job(lives, most, **layout, **alone)
    last = launcher.processes[-1]
    # Nothing is left behind, and restarts are counted.
    assert all(each.is_released for each in launcher.processes)
    restarted = numbers[-1] + result.task_restarts
    assert restarted <= most and numbers == sorted(set(numbers))
    assert sum(len(each.starts) - len({*each}) for each in launcher.processes) <= most
    # It ends well if all tasks do; a failure is one of a task that the last start has had.
    codes = {
        life.code for name, starts in lives.items() for life in starts if name != "evaluator-0"
    }
    assert codes != {0} or (result.exit_code == 0 and numbers == [0])
    if result.first_failure is not None:
        assert result.exit_codes[result.first_failure] != 0
        assert result.first_failure not in result.terminated
    else:
        assert result.exit_code == 0
    assert {*result.exit_codes} == {*last}


COMING = st.lists(
    st.builds(Life, st.sampled_from([2.0, 9.0, 90.0]), st.sampled_from([0, 3, -9, 143])),
    min_size=1,
    max_size=3,
)


@settings(few, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(COMING, min_size=3, max_size=3),
    st.integers(1, 2),
    st.lists(st.integers(1, 30), max_size=4),
)
def test_workers_of_a_range_come_and_leave(monkeypatch, tmp_path, lives, least, asked):
    launcher = Launcher(monkeypatch, tmp_path)
    lives = {"chief-0": ends(40), **{f"worker-{i}": some for i, some in enumerate(lives)}}
    with JobRecord(["task.py"], {"worker": 3}, tmp_path, min_workers=least) as record:
        answers = ask_for_workers(launcher, record, *asked)
        options = {"record": record, "min_workers": least, "failure_grace": 5}
        result, seconds = launcher.run(lives, **{**SERVED, "workers": 3, **options})
        said = [answer.read_text() for answer in answers if answer.exists()]
    # Who asks is given a worker that does not run, while the job goes on, or told why not.
    started = [name for name, _ in launcher.processes[0].starts if name.startswith("worker-")]
    refused = [answer for answer in said if "all 3 workers" in answer or "is ending" in answer]
    assert len(started) - least == len(said) - len(refused)
    left = [int(line.split()[-3]) for line in launcher.lines if " has left (" in line]
    assert all(count >= least for count in left)
    # It ends with its chief, or when too few are left.
    if result.first_failure is None:
        assert result.exit_code == 0 and seconds >= 40 and len(said) == len(asked)
    else:
        # All the same, the chief may end well before it is ended.
        assert (result.exit_code != 0) == (not result.chief_has_ended_well) and seconds < 60
        assert result.first_failure.startswith("worker-")


def test_a_range_that_is_ending_takes_no_worker(launcher, tmp_path):
    lives = {"worker-0": ends(2, -9)}
    with JobRecord(["task.py"], {"worker": 2}, tmp_path, min_workers=1) as record:
        (answer,) = ask_for_workers(launcher, record, 3)
        options = {"record": record, "min_workers": 1, "failure_grace": 5, **SERVED}
        result, _ = launcher.run(lives, **options)
        assert "the job is ending, as worker-0 has failed: start it again" in answer.read_text()
    assert result.first_failure == "worker-0" and result.exit_code == 137
