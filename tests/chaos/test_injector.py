"""What comes of events, in processes that count steps as training does."""

import json
import pathlib
import sys

import pytest

from keras_psplus.chaos import spec
from keras_psplus.chaos.injector import Injector
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.processes import LocalCluster
from tests.support.jobs import environment

pytestmark = pytest.mark.processes
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
        # Without the package's __init__, which takes seconds.
        folder = str(pathlib.Path(sys.modules[Progress.__module__].__file__).parent)
        with Injector(spec.parse(text, ["worker-0", "worker-1"]), lines.append) as chaos:
            env = environment(**chaos.environment, CLUSTER=folder)
            cluster = LocalCluster(
                command, workers=2, env=env, log_dir=tmp_path, kill_grace=0.2, **kwargs
            )
            with cluster:
                chaos.watch(cluster)
                result = cluster.wait(60)
        return result, lines

    return run


def test_a_task_is_killed_at_the_very_step(disturbed):
    result, lines = disturbed("kill:worker0@step=4; kill:worker1@step=99", failure_grace=0)
    assert result.first_failure == "worker-0" and result.exit_codes["worker-0"] == -9
    assert result.logs["worker-0"].split() == "step 1 step 2 step 3".split()
    assert lines == [
        "chaos: kill:worker0@step=4 comes after step 4",
        "chaos: kill:worker1@step=99 did not come: the job ended before that step",
    ]


def test_a_task_is_stopped_for_a_while_and_then_slow(disturbed, tmp_path):
    text = "stop:worker1@step=5,for=0.8; slow:worker1@step=15,factor=20,for=1"
    _, lines = disturbed(text, steps=35, pause=0.1)
    assert lines == [
        "chaos: stop:worker1@step=5,for=0.8 comes after step 5",
        "chaos: stop:worker1@step=5,for=0.8 is over",
        "chaos: slow:worker1@step=15,factor=20,for=1 comes after step 15",
        "chaos: slow:worker1@step=15,factor=20,for=1 is over",
    ]
    gaps = json.loads((tmp_path / "gaps").read_text())
    assert max(gaps) >= 0.8
    assert len(gaps) >= 3


def test_random_events_say_what_was_drawn(disturbed):
    result, lines = disturbed("kill:random@seed=2,within=8", failure_grace=0)
    (event,) = spec.parse("kill:random@seed=2,within=8", ["worker-0", "worker-1"])
    assert lines[0] == f"chaos: seed 2 draws {event}"
    assert lines[1] == f"chaos: {event} comes after step {event.step}"
    assert result.first_failure == event.task


def test_without_chaos_nothing_is_called(monkeypatch):
    monkeypatch.delenv("KERAS_PSPLUS_CHAOS", raising=False)
    assert "count" not in vars(Progress(leads=True))
    monkeypatch.setenv("KERAS_PSPLUS_CHAOS", "3@/no/such/socket")
    assert "count" not in vars(Progress())
    progress = Progress(leads=True)
    for _ in range(5):  # a launcher that has gone does not end the job
        progress.count(1)
    assert progress.steps == 5
