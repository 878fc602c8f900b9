"""What comes of events, in processes that count steps as training does."""

import json
import pathlib
import sys

import pytest

from keras_psplus.cluster.monitor.progress import OBSERVER_VARIABLE, Progress
from keras_psplus.cluster.processes import LocalCluster
from tests.lab import run as lab_run
from tests.lab.faults import Injector, parse
from tests.support.jobs import environment

pytestmark = pytest.mark.processes
# Of the module itself: the package's __init__ takes seconds.
FOLDER = str(pathlib.Path(sys.modules[Progress.__module__].__file__).parent)
# Worker 0 counts steps; worker 1 notes the times for which it was held up.
JOB = """
import json, os, pathlib, sys, time
sys.path.insert(0, os.environ["CLUSTER"])
import progress
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
counter = progress.Progress(leads=index == 0)
begun = pathlib.Path(sys.argv[1] + ".begun")
if index:
    begun.touch()
    gaps, last = [], time.monotonic()
    while not os.path.exists(sys.argv[1] + ".end"):
        time.sleep(0.01)
        gap, last = time.monotonic() - last, time.monotonic()
        if gap > 0.3:
            gaps.append(gap)
            pathlib.Path(sys.argv[1]).write_text(json.dumps(gaps))
    sys.exit()
deadline = time.monotonic() + 30
while not begun.exists():  # What disturbs worker 1 before it looks, it does not note.
    assert time.monotonic() < deadline
    time.sleep(0.01)
for step in range(1, int(sys.argv[2]) + 1):
    counter.count(1)
    print("step", step, flush=True)
    time.sleep(float(sys.argv[3]))
pathlib.Path(sys.argv[1] + ".end").touch()
"""


@pytest.fixture
def disturbed(tmp_path):
    """Runs the job with some events; returns the result and what was logged."""

    def run(text, steps=10, pause=0.0, **kwargs):
        lines, gaps = [], tmp_path / "gaps"
        command = [sys.executable, "-c", JOB, str(gaps), str(steps), str(pause)]
        with Injector(parse(text, ["worker-0", "worker-1"]), lines.append) as faults:
            env = environment(**faults.environment, CLUSTER=FOLDER)
            cluster = LocalCluster(
                command, workers=2, env=env, log_dir=tmp_path, kill_grace=0.2, **kwargs
            )
            with cluster:
                faults.watch(cluster)
                result = cluster.wait(60)
        return result, lines

    return run


def test_a_task_is_killed_at_the_very_step(disturbed):
    result, lines = disturbed("kill:worker0@step=4; kill:worker1@step=99", failure_grace=0)
    assert result.first_failure == "worker-0" and result.exit_codes["worker-0"] == -9
    assert result.logs["worker-0"].split() == "step 1 step 2 step 3".split()
    assert lines == [
        "fault: kill:worker0@step=4 comes after step 4",
        "fault: kill:worker1@step=99 did not come: the job ended before that step",
    ]


def test_a_task_is_stopped_for_a_while_and_then_slow(disturbed, tmp_path):
    text = "stop:worker1@step=5,for=0.8; slow:worker1@step=15,factor=20,for=1"
    _, lines = disturbed(text, steps=35, pause=0.1)
    assert lines == [
        "fault: stop:worker1@step=5,for=0.8 comes after step 5",
        "fault: stop:worker1@step=5,for=0.8 is over",
        "fault: slow:worker1@step=15,factor=20,for=1 comes after step 15",
        "fault: slow:worker1@step=15,factor=20,for=1 is over",
    ]
    gaps = json.loads((tmp_path / "gaps").read_text())
    assert max(gaps) >= 0.8
    assert len(gaps) >= 3


def test_random_events_say_what_was_drawn(disturbed):
    result, lines = disturbed("kill:random@seed=2,within=8", failure_grace=0)
    (event,) = parse("kill:random@seed=2,within=8", ["worker-0", "worker-1"])
    assert lines[0] == f"fault: seed 2 draws {event}"
    assert lines[1] == f"fault: {event} comes after step {event.step}"
    assert result.first_failure == event.task


def test_without_an_observer_nothing_is_called(monkeypatch):
    monkeypatch.delenv(OBSERVER_VARIABLE, raising=False)
    assert not Progress(leads=True).observers
    monkeypatch.setenv(OBSERVER_VARIABLE, "/no/such/socket")
    assert not Progress().observers
    progress = Progress(leads=True)
    for _ in range(5):  # a launcher that has gone does not end the job
        progress.count(1)
    assert progress.steps == 5


def test_the_launcher_starts_a_job_with_faults(tmp_path, capfd):
    script = tmp_path / "count.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {FOLDER!r})\nimport progress\n"
        "counter = progress.Progress(leads=True)\n"
        "for step in range(20):\n    counter.count(1)\n"
        "print('attempt', os.environ['KERAS_PSPLUS_RESTART'], 'took', counter.steps)\n"
    )
    faults = "kill:worker0@step=7; kill:worker0@step=99"
    flags = ["--workers=1", "--max_restarts=1", f"--log_dir={tmp_path}"]
    assert lab_run.main([faults, *flags, str(script)]) == 0
    assert [line for line in capfd.readouterr().out.splitlines() if "failed," not in line] == [
        "keras-psplus: fault: kill:worker0@step=7 comes after step 7",
        "keras-psplus: worker-0 has failed (ended by signal 9); restart 1 of 1 begins in 1 s",
        "[worker-0] attempt 1 took 20",
        "keras-psplus: fault: kill:worker0@step=99 did not come: the job ended before that step",
    ]
