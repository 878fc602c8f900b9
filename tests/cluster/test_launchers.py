"""Processes that Open MPI's mpirun and torchrun have started train one model."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from keras_psplus.cluster.ports import free_ports

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("slurm_job.py")
PROGRAM = [sys.executable, "-m", "keras_psplus", "exec", "--strategy", "all_reduce", str(JOB)]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def needs(program, package):
    reason = f"no {program}: {package}"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


def started(*commands):
    """Runs commands beside each other; returns the output of each."""
    environ = {**os.environ, **QUIET}
    running = [
        subprocess.Popen(
            list(command),
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=560)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, text in zip(running, said):
        assert process.returncode == 0, text
    return said


@pytest.fixture(scope="module")
def loss():
    """The last loss of one process."""
    (text,) = started([sys.executable, str(JOB)])
    return float(re.search(r"^loss (\S+)", text, re.MULTILINE)[1])


def check(text, loss, launcher):
    losses = [float(found) for found in re.findall(r"loss (\d\S+)$", text, re.MULTILINE)]
    assert losses == pytest.approx([loss] * 2, abs=2e-5), text
    assert re.search(rf"variables of {launcher}: this is worker-1 of 2 worker", text), text


@needs("mpirun", "apt-get install openmpi-bin")
def test_mpirun(loss):
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    (text,) = started(["mpirun", *options, *PROGRAM])
    check(text, loss, "Open MPI's mpirun")


@needs("torchrun", "pip install torch")
def test_torchrun_on_two_nodes(loss):
    # Both are this machine, and do not know it.
    (port, _) = free_ports(2)
    common = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--no-python"]
    texts = started(*(["torchrun", *common, f"--node-rank={rank}", *PROGRAM] for rank in range(2)))
    check("".join(texts), loss, r"RANK and WORLD_SIZE \(torchrun\)")
