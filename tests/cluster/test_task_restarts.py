"""A worker that serves a chief is started again by itself, while the others go on."""

import pathlib
import sys
import textwrap

import pytest

from keras_psplus.cluster import restarts
from keras_psplus.cluster.launcher.task_restarts import TaskRestarts
from keras_psplus.cluster.processes import LocalCluster
from tests.endings import wait_for_end

HEAD = """
import json, os, pathlib, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"
here = pathlib.Path(sys.argv[1])

def starts():
    file = here / name
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    return len(file.read_text())

def wait_for(file):
    while not (here / file).exists():
        time.sleep(0.05)
"""
# The chief ends when worker 0 has been started so many times.
CHIEF = """
count = starts()
if name == "chief-0":
    while len((here / "worker-0").read_text() if (here / "worker-0").exists() else "") < {}:
        time.sleep(0.05)
    time.sleep(0.3)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script in a chief, two workers and a ps, and its job as often as it may."""

    def run(body, max_restarts, tasks_alone=True, **options):
        script = tmp_path / "script.py"
        script.write_text(HEAD + textwrap.dedent(body))
        lines, made = [], []

        def make(restart):
            made.append(restart)
            return LocalCluster(
                [sys.executable, str(script), str(tmp_path)],
                log_dir=tmp_path / "logs",
                restart=restart,
                task_restarts=max_restarts - restart if tasks_alone else 0,
                **{"workers": 2, "ps": 1, "chief": True, **options},
                **{"kill_grace": 2.0, "failure_grace": 0.5},
            )

        result = restarts.run(make, max_restarts, 60, lines.append, sleep=lambda seconds: None)
        return result, made, lines

    return run


def count(tmp_path, name):
    return len(pathlib.Path(tmp_path, name).read_text())


def test_a_killed_worker_is_started_again_and_the_others_go_on(run, tmp_path):
    body = CHIEF.format(2) + "\nif name == 'worker-0' and count == 1: os.kill(os.getpid(), 9)"
    result, made, _ = run(body, 1)
    assert result.exit_code == 0
    assert result.first_failure is None
    assert (made, result.task_restarts) == ([0], 1)
    assert [count(tmp_path, name) for name in ("chief-0", "worker-0", "worker-1")] == [1, 2, 1]
    assert "keras-psplus: restart 1" in result.log_paths["worker-0"].read_text()
    # Ids and files of the first process are given back.
    assert result.exit_codes["worker-0"] == 0


def test_what_a_killed_worker_had_started_ends_with_it(run, tmp_path):
    body = CHIEF.format(2) + textwrap.dedent(
        """
        if name == "worker-0" and count == 1:
            import subprocess
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
            (here / "child").write_text(str(child.pid))
            os.kill(os.getpid(), 9)
        """
    )
    run(body, 1)
    wait_for_end(int((tmp_path / "child").read_text()))


def test_when_no_restart_is_left_the_job_ends(run):
    result, made, lines = run(CHIEF.format(99) + "\nif name == 'worker-0': sys.exit(3)", 1)
    assert result.exit_code == 3
    assert made == [0]
    assert lines == ["worker-0 has failed (exit code 3); no restart of 1 is left"]


def test_a_chief_that_fails_is_the_jobs_restart(run, tmp_path):
    body = CHIEF.format(2) + "\nif name == 'chief-0' and count == 1: sys.exit(1)"
    body += "\nif name == 'worker-0' and count == 1: os.kill(os.getpid(), 9)"
    result, made, lines = run(body, 2)
    assert result.exit_code == 0
    # One for the worker, and the job's next is the second.
    assert made == [0, 2]
    assert lines[0].startswith("chief-0 has failed (exit code 1); restart 2 of 2 begins")


SERVER_DIES = """
count = starts()
if name == "ps-0":
    os.kill(os.getpid(), 9) if count == 1 else time.sleep(100)
while len((here / "ps-0").read_text() if (here / "ps-0").exists() else "") < 2:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("alone", [True, False])
def test_a_server_without_a_chief_is_started_again_alone_if_that_is_asked_for(run, tmp_path, alone):
    options = {"chief": False, "server_restarts": alone, "server_grace": 0.1}
    result, made, lines = run(SERVER_DIES, 1, **options)
    assert result.exit_code == 0
    assert (made, result.task_restarts) == (([0], 1) if alone else ([0, 1], 0))
    # Of a job, others start again.
    assert count(tmp_path, "worker-1") == (1 if alone else 2)
    assert bool(lines) != alone


def test_a_worker_without_a_chief_is_a_part_of_the_job(run, tmp_path):
    body = "count = starts()\nif name == 'worker-0' and count == 1: os.kill(os.getpid(), 9)"
    body += "\nif name == 'ps-0': time.sleep(100)"
    options = {"chief": False, "server_restarts": True, "server_grace": 0.1}
    result, made, _ = run(body, 1, **options)
    assert (result.exit_code, made) == (0, [0, 1])


@pytest.mark.parametrize("code", [2])
def test_a_wrong_command_line_is_not_tried_again(run, code):
    result, made, _ = run(CHIEF.format(99) + f"\nif name == 'worker-1': sys.exit({code})", 3)
    assert (result.exit_code, made, result.task_restarts) == (code, [0], 0)


def test_the_whole_job_where_that_is_asked_for(run, tmp_path):
    body = "count = starts()\nif name == 'worker-0' and count == 1: os.kill(os.getpid(), 9)"
    body += "\nwait_for('worker-0')\ntime.sleep(1 if count == 1 else 0)"
    result, made, _ = run(body, 1, tasks_alone=False)
    assert (result.exit_code, made) == (0, [0, 1])
    assert count(tmp_path, "worker-1") == 2


def test_pauses_grow_for_a_task_that_fails_at_once(monkeypatch):
    lines, now = [], [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tasks = TaskRestarts(4, lines.append)
    for pause in (1, 2, 4):
        tasks.take("worker-0", -9, now[0])
        assert "worker-0" in tasks and not tasks.pop_due()
        now[0] += pause
        assert tasks.pop_due() == ["worker-0"]
    tasks.take("worker-0", -9, now[0] - 31)
    assert tasks.pop_due() == ["worker-0"]
    assert not tasks.can_take("worker-0", -9)
    failed = "worker-0 has failed (ended by signal 9), and the others go on"
    assert lines[1] == f"{failed}; restart 2 of 4 begins in 2 s"


@pytest.mark.parametrize("name", ["chief-0", "ps-0"])
def test_others_are_parts_of_the_job(name):
    assert not TaskRestarts(3, print).can_take(name, -9)
