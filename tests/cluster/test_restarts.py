"""Which ends of a job are followed by another start, and when."""

import sys

import pytest

from keras_psplus.cluster import restarts
from keras_psplus.cluster.launcher.results import ClusterResult
from keras_psplus.cluster.processes import LocalCluster


class Attempt:
    """A cluster that has ended, as `restarts.run` knows one."""

    def __init__(self, result):
        self._result = result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, timeout):
        return self._result


def failure(code=1, **more):
    return ClusterResult({"worker-0": 0, "worker-1": code}, {}, "worker-1", **more)


def ends(*results, max_restarts=3):
    """Runs attempts that end so; returns the last result, the lines, the pauses, and a count."""
    lines, pauses, made = [], [], []

    def make(restart):
        made.append(restart)
        return Attempt(results[restart])

    result = restarts.run(make, max_restarts, log=lines.append, sleep=pauses.append)
    return result, lines, pauses, made


def test_a_job_that_fails_at_once_is_given_up_after_pauses_that_grow():
    result, lines, pauses, made = ends(*[failure(-9)] * 4)
    assert made == [0, 1, 2, 3]
    assert pauses == [1, 2, 4]
    assert lines == [
        "worker-1 has failed (ended by signal 9); restart 1 of 3 begins in 1 s",
        "worker-1 has failed (ended by signal 9); restart 2 of 3 begins in 2 s",
        "worker-1 has failed (ended by signal 9); restart 3 of 3 begins in 4 s",
        "worker-1 has failed (ended by signal 9); no restart of 3 is left",
    ]
    assert result.exit_code == 137


def test_a_job_that_had_run_for_long_goes_on_at_once(monkeypatch):
    monkeypatch.setattr(restarts, "SHORT_SECONDS", 0.0)
    _, lines, pauses, made = ends(failure(), ClusterResult({"worker-0": 0}, {}))
    assert made == [0, 1] and pauses == [0]
    assert lines == ["worker-1 has failed (exit code 1); restart 1 of 3 begins in 0 s"]


@pytest.mark.parametrize(
    "result",
    [
        ClusterResult({"worker-0": 0}, {}),
        failure(signal=2),
        failure(-15, signal=15),
        ClusterResult({"worker-0": -15}, {}, timed_out=True),
        failure(2),
    ],
    ids=["success", "Ctrl-C", "SIGTERM", "time-out", "wrong command line"],
)
def test_other_ends_are_final(result):
    last, lines, _, made = ends(result)
    assert made == [0] and lines == [] and last is result


def test_training_that_went_on_without_a_worker_is_not_done_again(tmp_path):
    script = (
        "import json, os, sys\n"
        "sys.exit(json.loads(os.environ['TF_CONFIG'])['task']['type'] == 'worker')"
    )
    lines = []
    result = restarts.run(
        lambda restart: LocalCluster(
            [sys.executable, "-c", script], workers=1, ps=1, chief=True, log_dir=tmp_path
        ),
        2,
        log=lines.append,
    )
    assert result.exit_code == 1
    assert lines == ["worker-0 has failed, but the chief has ended well: no restart"]


def test_every_attempt_has_new_ports_and_the_same_logs(tmp_path):
    script = (
        "import json, os, sys\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "attempt = int(os.environ['KERAS_PSPLUS_RESTART'])\n"
        "print('attempt', attempt, config['cluster']['worker'])\n"
        "sys.exit(0 if attempt == 2 else 3)\n"
    )

    def make(restart):
        command = [sys.executable, "-c", script]
        return LocalCluster(command, workers=1, log_dir=tmp_path, restart=restart)

    result = restarts.run(make, 5, log=lambda line: None, sleep=lambda seconds: None)
    assert result.exit_code == 0
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line.split(" [")[0] for line in lines] == [
        "attempt 0",
        "keras-psplus: restart 1",
        "attempt 1",
        "keras-psplus: restart 2",
        "attempt 2",
    ]
    assert len({line.split(" [")[1] for line in lines[::2]}) == 3
    # A result is that of its own attempt.
    assert result.logs["worker-0"].startswith("attempt 2 ")
