"""The slow worker of a job is named with its cause, in the log, the JSON log and `status`."""

import json
import pathlib

import pytest

from tests.cluster.test_trace import check
from tests.lab import netlab
from tests.support.jobs import launch

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("slow_task_job.py")


def run(folder, kind, cause, *flags, **options):
    """Returns the output of a job and the `step_times` lines of its JSON log."""
    log = folder / "log.jsonl"
    flags = [f"--json_log={log}", f"--log_dir={folder}/logs", *flags]
    output = launch(*flags, JOB, kind, cause, **options)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # Those of the step that is traced are left out.
    assert any(line["parts"] for line in lines if line["event"] == "steps")
    return output, [line for line in lines if line["event"] == "step_times"]


@pytest.mark.extended
def test_all_reduce(tmp_path):
    cause = "data"
    output, lines = run(tmp_path, "MultiWorkerMirroredStrategy", cause, "--workers=2")
    assert [line["epoch"] for line in lines] == [1, 2]
    for line in lines:
        assert (line["slowest"]["task"], line["slowest"]["cause"]) == ("worker-1", cause)
        slow, other = line["tasks"]["worker-1"], line["tasks"]["worker-0"]
        # The first epoch's first step is traced, and does not count.
        assert slow["steps"] == other["steps"] == (5 if line["epoch"] == 1 else 6)
        assert slow[f"{cause}_ms"] > other[f"{cause}_ms"]
        assert other["wait_ms"] > slow["wait_ms"]
    assert "slowest: worker-1" in output and f"by {cause}" in output


@pytest.mark.extended
def test_a_pipeline(tmp_path):
    cause, task = "compute", "worker-1"
    trace = tmp_path / "trace.json"
    flags = "--workers=2", "--chief", f"--trace={trace}", "--trace_steps=2"
    output, lines = run(tmp_path, "PipelineStrategy", cause, *flags)
    assert [line["epoch"] for line in lines] == [1, 2]
    for line in lines:
        tasks = line["tasks"]
        assert (line["slowest"]["task"], line["slowest"]["cause"]) == (task, cause)
        assert [tasks[f"worker-{i}"]["part"] for i in range(2)] == ["stage 0", "stage 1"]
        # The first epoch's first step is traced, and does not count.
        assert {each["steps"] for each in tasks.values()} == {5 if line["epoch"] == 1 else 6}
        assert line["slowest"]["part"] == "stage 1"
        assert tasks["worker-0"]["wait_ms"] > tasks["worker-1"]["wait_ms"]
    assert f"slowest: {task}" in output and f"by {cause}" in output
    assert "slowest: worker-1 (stage 1), " in output

    spans = check(json.loads(trace.read_text()), ["chief-0", "worker-0", "worker-1"])
    assert {e["name"] for e in spans["chief-0"]} == {"step", "read", "wait"}
    first, last = ({e["name"]: e for e in spans[f"worker-{i}"]} for i in range(2))
    both = {*first, *last}
    # Actions of microseconds may lie within others.
    assert {"forward 0", "wait"} <= both and {"backward 0", "backward 1"} & both, both
    assert both <= {f"{d} {i}" for d in ("forward", "backward") for i in range(2)} | {
        *("wait", "receive")
    }
    # By one clock, what a stage needs is there before it begins.
    assert first["forward 0"]["ts"] < last["forward 0"]["ts"]


@pytest.mark.extended
def test_a_slow_link(tmp_path):
    problem = netlab.why_not(delay=1e-3)
    if problem is not None:
        pytest.skip(f"no network namespaces here: {problem}")
    options = {"faults": "delay:worker1@step=1,ms=100"}
    _, lines = run(tmp_path, "MultiWorkerMirroredStrategy", "none", "--workers=3", **options)
    assert (lines[-1]["slowest"]["task"], lines[-1]["slowest"]["cause"]) == ("worker-1", "link")
