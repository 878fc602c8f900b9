"""Backup folder behind a link, shared by two calls of `fit`, in a job that fails twice."""

import json
import os
import pathlib
import subprocess
import sys

JOB = pathlib.Path(__file__).with_name("shared_folder_job.py")


def run(folder, *options):
    """The job with two workers under the launcher: what the chief prints, and the log."""
    command = [sys.executable, "-m", "keras_psplus", "run", "--workers", "2", *options]
    done = subprocess.run(
        [*command, str(JOB), str(folder)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    lines = [line.removeprefix("[worker-0] ") for line in log.splitlines()]
    (found,) = [json.loads(line) for line in lines if line.startswith("[") and '"left"' in line]
    return *found, log


def test_a_call_that_had_ended_leaves_the_backup_to_the_next(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    # Without it, the script fails after its training.
    (whole / "failed").touch()
    trained, expected, _ = run(whole)
    assert trained == 2 * 3 * 8
    # The 36th batch is one of the second call.
    chaos = ["--chaos", "kill:worker1@step=36"]
    trained, found, log = run(broken, "--max_restarts", "2", *chaos)
    assert "call 1 of `fit` with the backup" in log and "is passed over" in log, log[-4000:]
    # The second start fails after its training: the third goes on after the last backup of that.
    assert "after the training" in log and trained <= 4, log[-4000:]
    assert found == expected
    assert found["left"] == [True, []]
