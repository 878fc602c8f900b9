"""Jobs under a real Slurm of two nodes, by the scripts of deploy/slurm."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from tests.cluster import slurm_nodes
from tests.parameter_server import kill_job
from tests.parameter_server.test_elastic import go_on
from tests.parameter_server.test_jobs import check_table, result_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
JOB = pathlib.Path(__file__).with_name("slurm_job.py")
REASON = slurm_nodes.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}"),
    pytest.mark.timeout(400),
    pytest.mark.processes,
]
# What takes a process of its own core here.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    # Short: sockets' paths are.
    folder = tmp_path_factory.mktemp("slurm")
    environ = {**QUIET, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        with slurm_nodes.Slurm(folder) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def loss():
    """The last loss of one process."""
    environ = {**os.environ, **QUIET, "KERAS_PSPLUS_CLUSTER": "none"}
    ran = subprocess.run(
        [sys.executable, JOB], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    return float(re.search(r"loss (\S+)", ran.stdout)[1])


def submit(slurm, script, *args, options=(), program=JOB, **env):
    """Submits a script of deploy/slurm; returns the job's number and the file of its output."""
    out = slurm.folder / f"out-{time.monotonic_ns()}"
    command = ["sbatch", "--parsable", f"--output={out}", *options, str(SCRIPTS / script)]
    said = slurm.run(*command, str(program), *args, **env)
    return said.strip().partition(";")[0], out


def state(slurm, job):
    found = re.search(r"JobState=(\w+)", slurm.run("scontrol", "show", "job", job))
    return found[1]


def wait(slurm, job, out, holds, seconds=150):
    """Waits until something holds of a job's state and its output, and returns the output."""
    end = time.monotonic() + seconds
    while True:
        text = out.read_text(errors="replace") if out.exists() else ""
        now = state(slurm, job)
        if holds(now, text):
            return text
        assert time.monotonic() < end, f"job {job} is {now} after {seconds} s:\n{text}"
        time.sleep(0.5)


def ended(now, text):
    return now not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


def losses(text):
    return [float(found) for found in re.findall(r"^loss (\S+)", text, re.MULTILINE)]


def test_parameter_servers(slurm):
    job, out = submit(slurm, "parameter_server.sbatch")
    text = wait(slurm, job, out, ended)
    assert state(slurm, job) == "COMPLETED", text
    assert len(losses(text)) == 1
    for name in ("chief-0", "worker-1", "ps-1"):
        assert re.search(rf"this is {name} of 1 chief, 2 worker, 2 ps", text)


def test_workers_come_and_go(slurm, tmp_path):
    log, program = tmp_path / "worker-1", [kill_job.__file__, str(tmp_path), "steps"]
    script = "workers_that_come_and_go.sbatch"
    job, out = submit(slurm, script, *program[1:], program=program[0])
    wait(slurm, job, out, lambda now, text: "steps batch 11." in text or ended(now, text))
    with log.open("w") as file:
        command = ["srun", f"--jobid={job}", "--nodes=1", "--ntasks=1", "--nodelist=n2"]
        command += ["bash", str(SCRIPTS / script), "--join", "1"]
        second = slurm.start(*command, *program, stdout=file)
        wait(slurm, job, out, lambda now, text: "worker-1 has joined" in text or ended(now, text))
        # Slurm 22.05 looks for the step once more, and says that there is none.
        slurm.run("scancel", "--signal=TERM", f"{job}.1", check=False)
        second.wait(60)
    go_on(tmp_path)
    text = wait(slurm, job, out, ended)
    assert state(slurm, job) == "COMPLETED", text
    assert "the chief does without this worker" in log.read_text()
    found = result_of("steps", text)
    check_table(found)
    assert found["steps"] == found["iterations"] == kill_job.STEPS


def test_tables_on_the_nodes_of_another_component(slurm):
    job, out = submit(slurm, "hybrid.sbatch", JOB_TABLE="1")
    text = wait(slurm, job, out, ended)
    assert state(slurm, job) == "COMPLETED", text
    assert len(losses(text)) == 2
    assert re.search(r"this is ps-1 of 2 worker, 2 ps", text)


def test_two_nodes_equal_one_process_and_resume_on_one_of_them(slurm, loss, tmp_path):
    job, out = submit(slurm, "all_reduce.sbatch", str(tmp_path / "backup"), JOB_HELD_IN_EPOCH="2")
    text = wait(slurm, job, out, lambda now, text: text.count("epoch 2 begins") == 4)
    for i, node in enumerate(("n1", "n1", "n2", "n2")):
        assert re.search(rf"variables of Slurm .*worker-{i} of 4 worker, at {node}:", text)
    slurm.run("scontrol", "requeue", job)
    # Slurm would hold it back for two minutes.
    wait(slurm, job, out, lambda now, text: now == "PENDING")
    # Slurm itself keeps the number of nodes.
    slurm.run("scontrol", "update", f"JobId={job}", "NumNodes=1-1", "NumTasks=2", "StartTime=now")
    text = wait(slurm, job, out, lambda now, text: ended(now, text) and len(losses(text)) == 2)
    assert "this is worker-1 of 2 worker" in text
    assert losses(text) == pytest.approx([loss] * 2, abs=2e-5)
    assert (text.count("epoch 0 begins"), text.count("epoch 2 begins")) == (4, 6), text


@pytest.mark.extended
def test_a_job_goes_on_with_another_number_of_tasks(slurm, loss, tmp_path):
    backup = str(tmp_path / "backup")
    job, out = submit(slurm, "all_reduce.sbatch", backup, JOB_HELD_IN_EPOCH="2", JOB_SAVE_FREQ="3")
    wait(slurm, job, out, lambda now, text: text.count("epoch 2 begins") == 4)
    slurm.run("scancel", job)
    wait(slurm, job, out, ended, seconds=60)
    # Submitted again for half as many.
    options = ["--ntasks-per-node=1"]
    job, out = submit(slurm, "all_reduce.sbatch", backup, options=options, JOB_SAVE_FREQ="3")
    text = wait(slurm, job, out, ended)
    assert "this is worker-1 of 2 worker" in text
    assert "training goes on after batch 2 of epoch 2" in text
    assert losses(text) == pytest.approx([loss] * 2, abs=2e-5)


def test_a_preempted_job_is_requeued_and_goes_on_after_the_very_batch(slurm, loss, tmp_path):
    backup = str(tmp_path / "backup")
    job, out = submit(slurm, "all_reduce.sbatch", backup, JOB_PAUSE="1")
    wait(slurm, job, out, lambda now, text: text.count("epoch 1 begins") == 4 or ended(now, text))
    slurm.run("scancel", "--signal=TERM", job)
    text = wait(slurm, job, out, ended)
    assert " ExitCode=143:0" in slurm.run("scontrol", "show", "job", job), text
    slurm.run("scontrol", "requeue", job)
    wait(slurm, job, out, lambda now, text: now == "PENDING")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    text = wait(slurm, job, out, lambda now, text: ended(now, text) and losses(text))
    assert re.search(r"training goes on after batch \d of epoch [12]", text), text
    assert losses(text) == pytest.approx([loss] * 4, abs=2e-5)


@pytest.mark.extended
def test_a_cancelled_job_ends(slurm):
    job, out = submit(slurm, "all_reduce.sbatch", JOB_HELD_IN_EPOCH="0")
    wait(slurm, job, out, lambda now, text: "epoch 0 begins" in text)
    slurm.run("scancel", job)
    wait(slurm, job, out, ended, seconds=60)
    assert state(slurm, job) == "CANCELLED"


def test_a_layout_that_does_not_fit_ends_the_job_as_failed(slurm):
    job, out = submit(slurm, "all_reduce.sbatch", KERAS_PSPLUS_LAYOUT="worker:9")
    text = wait(slurm, job, out, ended, seconds=60)
    assert "The layout has 9 tasks, but the job has 4 processes" in text
    shown = slurm.run("scontrol", "show", "job", job)
    # That of the task which is first to say so, or of one that srun has ended then.
    assert re.search("JobState=FAILED(?s:.*) ExitCode=[1-9]", shown), shown


def test_a_script_without_srun_does_not_train_alone(slurm):
    said = slurm.run(
        *("salloc", "--ntasks=2", sys.executable, str(JOB)),
        check=False,
        KERAS_PSPLUS_STRATEGY="all_reduce",
    )
    assert "this process was not started by srun" in said
    assert "loss" not in said.splitlines()[-1]
