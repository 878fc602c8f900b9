"""Backup folder behind a link, shared by two calls of `fit`, in a job that fails twice."""

import json
import pathlib

import pytest

from tests.support.jobs import launch
from tests.support.results import assert_close

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("shared_folder_job.py")


def run(folder, *flags, **options):
    """What the chief prints, and the log."""
    log = launch(*flags, JOB, folder, **options)
    lines = [line.removeprefix("[worker-0] ") for line in log.splitlines()]
    (found,) = [json.loads(line) for line in lines if line.startswith("[") and '"epochs"' in line]
    return *found, log


@pytest.mark.extended
def test_a_call_that_had_ended_leaves_the_backup_to_the_next(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    # Without it, the script fails after its training.
    (whole / "failed").touch()
    trained, expected, _ = run(whole, "--workers=1")
    assert trained == 2 * 3 * 8
    # The 36th batch is one of the second call.
    options = {"faults": "kill:worker1@step=36", "may_show_errors": True}
    trained, found, log = run(broken, "--workers=2", "--max_restarts=2", **options)
    assert "call 1 of `fit` with the backup" in log and "is passed over" in log, log[-4000:]
    # The second start fails after its training: the third goes on after the last backup of that.
    assert "after the training" in log and trained <= 4, log[-4000:]
    for folder in (whole, broken):
        assert (folder / "link").is_symlink() and not list((folder / "backup").iterdir())
    assert_close(found, expected, 2e-5)
