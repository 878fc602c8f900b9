"""`run --trace` and the goodput of a job that loses a worker once."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.cluster.test_trace import check

JOB = pathlib.Path(__file__).with_name("goodput_job.py")


def test_a_job_that_is_killed_once(tmp_path):
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.json"
    flags = ["--workers=2", "--max_restarts=1", "--chaos=kill:worker1@step=13", "--timeout=400"]
    flags += [f"--json_log={log}", f"--trace={trace}", "--trace_steps=6"]
    flags += [f"--log_dir={tmp_path}/logs"]
    command = [sys.executable, "-m", "keras_psplus", "run", *flags, str(JOB), str(tmp_path / "b")]
    done = subprocess.run(command, cwd=JOB.parents[2], capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    goodput = lines[-1]["goodput"]
    assert goodput["restarts"] == 1
    # Backups after every fifth step: those after the tenth are trained again.
    assert 2 <= goodput["repeated_steps"] <= 4 and goodput["repeated_s"] > 0
    seconds = [s for name, s in goodput.items() if name.endswith("_s") and name != "wall_s"]
    assert abs(sum(seconds) - goodput["wall_s"]) < 0.1
    kinds = "training start tracing restart saves evaluation".split()
    assert all(goodput[f"{kind}_s"] > 0 for kind in kinds), goodput
    # Of seconds that are rounded to milliseconds, in a job of some seconds.
    share = goodput["training_s"] / goodput["wall_s"]
    assert goodput["goodput"] == pytest.approx(share, abs=1e-3 / goodput["wall_s"] + 1e-4)
    assert "goodput" in done.stdout + done.stderr

    found = check(json.loads(trace.read_text()), ["worker-0", "worker-1"])
    for spans in found.values():
        names = {e["name"] for e in spans}
        assert {"step", "read", "compute", "update"} <= names and names & {"send", "wait"}
        steps = [e for e in spans if e["name"] == "step"]
        assert len(steps) == 6
        # All on one clock, within the job.
        assert max(e["ts"] + e["dur"] for e in steps) / 1e6 < goodput["wall_s"]
