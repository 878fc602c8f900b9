"""Jobs that begin with one worker, get a second, and lose the first."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from keras_psplus.cli import main
from keras_psplus.cluster.monitor import job as job_folder
from tests.parameter_server import kill_job
from tests.parameter_server.test_jobs import check_table, result_of
from tests.support import jobs

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def started(command, folder, name="launcher", **env):
    """A command of the launcher that runs `kill_job.py` in one of its tasks, or all."""
    words = [sys.executable, "-m", "keras_psplus", *command, kill_job.__file__, folder, "steps"]
    with (folder / name).open("w") as out:
        env = jobs.environment(**env)
        process = subprocess.Popen([str(word) for word in words], env=env, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def go_on(folder):
    for gate in ("killed", "back"):
        (folder / f"steps {gate}").touch()


def check(log):
    found = result_of("steps", log)
    check_table(found)
    assert found["steps"] == found["iterations"] == kill_job.STEPS
    assert "Traceback" not in log
    # What the compressor keeps on the one that has left has left with it.
    assert "cannot be reached" not in log
    assert found["states"] == ["worker-1-of-2"]


@pytest.mark.extended
def test_a_second_srun_joins(tmp_path):
    """By the variables of Slurm, set by hand: the first step has chief, ps and worker-0."""
    env = {"KERAS_PSPLUS_HOSTS": ",".join(["127.0.0.1"] * 4), "SLURM_JOB_ID": os.getpid()}
    command = ["exec", "--workers=1:2", "--ps=1", "--strategy=async_parameter_server"]
    with contextlib.ExitStack() as ends:

        def srun(step, tasks, rank, *more):
            own = {"STEP_ID": step, "STEP_NUM_TASKS": tasks, "PROCID": rank}
            own = env | {f"SLURM_{name}": value for name, value in own.items()}
            run = started([*command, *more], tmp_path, f"{step}-{rank}", **own)
            return ends.enter_context(run)

        chief, ps, first = (srun(0, 3, rank) for rank in range(3))
        log = tmp_path / "0-0"
        jobs.wait_for((log, "steps batch 11."), 240)
        # Steps have the ports of step 0.
        second = srun(1, 1, 0, "--join=1")
        jobs.wait_for((log, "worker-1 has joined, and takes steps from now on"), 240)
        first.terminate()
        assert first.wait(120) == 143
        go_on(tmp_path)
        assert [process.wait(240) for process in (chief, ps, second)] == [0, 0, 0]
    check(log.read_text())


def test_a_worker_comes_and_another_leaves(tmp_path):
    flags = ["--workers=1:2", "--ps=1", f"--log_dir={tmp_path}", f"--json_log={tmp_path}/log.jsonl"]
    chief = tmp_path / "chief-0.log"
    with started(["run", *flags], tmp_path) as job:
        jobs.wait_for((chief, "steps batch 11."), 240)
        assert main.main(["add-worker", str(job.pid)]) == 0
        jobs.wait_for((chief, "worker-1 has joined, and takes steps from now on"), 240)
        (said,) = (said for _, said, _ in job_folder.read_all() if said["pid"] == job.pid)
        os.kill(said["tasks"]["worker-0"]["pid"], signal.SIGTERM)
        jobs.wait_for((tmp_path / "worker-0.log", "the chief does without this worker"))
        # Half of the steps can only come from the second one.
        go_on(tmp_path)
        assert job.wait(240) == 0, (tmp_path / "launcher").read_text()[-4000:]
    check(chief.read_text())
    assert "worker-0 has left (exit code 143), and 1 go on" in (tmp_path / "launcher").read_text()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    ends = {line["task"]: line["exit_code"] for line in lines if line["event"] == "task_ended"}
    assert ends == {"chief-0": 0, "worker-0": 143, "worker-1": 0, "ps-0": 0}
