"""Jobs that begin with one worker, get a second, and lose the first."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from keras_psplus.cli import main
from keras_psplus.cluster.monitor import job_folder
from tests.parameter_server.test_jobs import ENVIRONMENT, JOB, counts
from tests.parameter_server.waiting import wait_for

STEPS = 400


@pytest.fixture
def job(tmp_path):
    """Starts the job, and ends it."""
    env = {**os.environ, **ENVIRONMENT, "COUNTING_JOB_GATE": str(tmp_path / "gate")}
    env |= {"COUNTING_JOB_COMPRESSION": "int8", "COUNTING_JOB_STATE": str(tmp_path / "state.npz")}
    env["COUNTING_JOB_TABLE"] = ""
    flags = ["--workers=1:2", "--ps=1", f"--log_dir={tmp_path}", f"--json_log={tmp_path}/log.jsonl"]
    with (tmp_path / "launcher").open("w") as out:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "keras_psplus", "run", *flags, str(JOB), str(STEPS)],
            env=env,
            stdout=out,
            stderr=out,
        )
    yield launcher
    launcher.terminate()
    launcher.wait(60)


def test_a_second_srun_joins(tmp_path):
    """By the variables of Slurm, set by hand: the first step has chief, ps and worker-0."""
    env = {**os.environ, **ENVIRONMENT, "COUNTING_JOB_GATE": str(tmp_path / "gate")}
    env |= {"KERAS_PSPLUS_HOSTS": ",".join(["127.0.0.1"] * 4), "SLURM_JOB_ID": str(os.getpid())}
    flags = ["--workers=1:2", "--ps=1", "--strategy=async_parameter_server"]
    with contextlib.ExitStack() as ends:

        def srun(step, tasks, rank, *more):
            own = {"STEP_ID": step, "STEP_NUM_TASKS": tasks, "PROCID": rank}
            log = tmp_path / f"{step}-{rank}"
            out = ends.enter_context(log.open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", "keras_psplus", "exec", *flags, *more, JOB, str(STEPS)],
                env=env | {f"SLURM_{name}": str(value) for name, value in own.items()},
                stdout=out,
                stderr=out,
            )
            ends.callback(process.kill)
            return process, log

        (chief, log), (ps, _), (first, _) = (srun(0, 3, rank) for rank in range(3))
        wait_for(log, "batch 50\n", seconds=240)
        # Steps have the ports of step 0.
        second, _ = srun(1, 1, 0, "--join=1")
        wait_for(log, "worker-1 has joined, and takes steps from now on", seconds=240)
        first.terminate()
        assert first.wait(120) == 143
        (tmp_path / "gate").touch()
        assert [process.wait(240) for process in (chief, ps, second)] == [0, 0, 0]
    assert counts(log.read_text()) == [STEPS, STEPS, 2 * STEPS]


def test_a_worker_comes_and_another_leaves(job, tmp_path):
    chief = tmp_path / "chief-0.log"
    wait_for(chief, "batch 50\n", seconds=240)
    assert main.main(["add-worker", str(job.pid)]) == 0
    wait_for(chief, "worker-1 has joined, and takes steps from now on", seconds=240)
    (said,) = (said for _, said, _ in job_folder.read_all() if said["pid"] == job.pid)
    os.kill(said["tasks"]["worker-0"]["pid"], signal.SIGTERM)
    wait_for(tmp_path / "worker-0.log", "the chief does without this worker")
    # Half of the steps can only come from the second one.
    (tmp_path / "gate").touch()
    assert job.wait(240) == 0, (tmp_path / "launcher").read_text()[-4000:]
    assert counts(chief.read_text()) == [STEPS, STEPS, 2 * STEPS]
    assert f"updates of rows: {{1: {STEPS}}}" in chief.read_text()
    assert "Traceback" not in chief.read_text()
    # What the compressor keeps on the one that has left has left with it.
    assert "cannot be reached" not in chief.read_text()
    with np.load(tmp_path / "state.npz") as saved:
        assert {name.split("/")[0] for name in saved} == {"worker-1-of-2"}
    assert "worker-0 has left (exit code 143), and 1 go on" in (tmp_path / "launcher").read_text()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    ends = {line["task"]: line["exit_code"] for line in lines if line["event"] == "task_ended"}
    assert ends == {"chief-0": 0, "worker-0": 143, "worker-1": 0, "ps-0": 0}
