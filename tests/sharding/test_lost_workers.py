"""Jobs with parts of a model on each worker resume in another cluster when a worker is lost."""

import pathlib
import re
import signal

import pytest

from tests.sharding import cases
from tests.support.cluster import reference
from tests.support.jobs import run_in_processes
from tests.support.results import assert_close, load
from tests.support.tiers import extended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

JOB = pathlib.Path(__file__).with_name("lost_job.py")


@pytest.mark.parametrize(
    "before, workers, after",
    [
        *extended(("all", 3, "all"), ("optimizer", 3, "optimizer")),
        # Fewer rows, or weights that are not cut.
        ("2x2/all", 4, "1x2"),
        *extended(("2x2", 4, "2x1"), ("2x2/optimizer", 4, "2x1/optimizer")),
        *extended(("2x2/optimizer", 4, "2x1/all")),
    ],
)
def test_two_workers_go_on_from_a_backup_when_one_of_more_is_lost(before, workers, after, tmp_path):
    victim = f"worker-{workers - 1}"
    result = run_in_processes(
        JOB, before, tmp_path, victim, workers=workers, expect_failure=True, failure_grace=60
    )
    for task, log in result.logs.items():
        if task == victim:
            assert result.exit_codes[task] == -signal.SIGKILL
        else:
            assert f"PeerLostError: {victim} (127.0.0.1:" in log, log[-3000:]
    expected = reference(cases.after_a_loss)
    for task, log in run_in_processes(JOB, after, tmp_path, workers=2).logs.items():
        assert_close(load(tmp_path / f"{task}.npz", log), expected, 2e-5)
        # Earlier epochs are not trained again.
        assert re.findall(r"^epoch (\d) begins", log, re.MULTILINE) == ["2", "3"], log[-3000:]
    slots = {name: value for name, value in expected.items() if name.startswith("slots")}
    assert_close(load(tmp_path / "ended.npz", ""), slots, 2e-5)
