"""Jobs whose workers are killed and come back: no update is wrong or lost, in any mode."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.processes import LocalCluster
from tests.parameter_server import kill_job
from tests.support import jobs
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

STEPS = kill_job.STEPS


class Job(contextlib.ExitStack):
    """A chief, two workers and a server that run phases of `kill_job.py`."""

    def __init__(self, folder, *phases):
        super().__init__()
        self.folder, self._again = folder, {}
        self._command = [sys.executable, kill_job.__file__, str(folder), *phases]
        self.cluster = LocalCluster(
            self._command,
            workers=2,
            ps=1,
            chief=True,
            env=jobs.environment(),
            log_dir=folder,
            # Whoever has to end has to do so by itself.
            failure_grace=70,
        )
        self.enter_context(self.cluster)

    @property
    def log(self):
        """The chief's."""
        return self.cluster.log_path("chief-0").read_text()

    def wait_for(self, text):
        jobs.wait_for((self.cluster.log_path("chief-0"), text), seconds=120)

    def go_on(self, phase, *gates):
        """Lets the chief go on that waits for files."""
        for gate in gates:
            (self.folder / f"{phase} {gate}").touch()

    def kill(self, name, phase, batch, is_last=False):
        """Kills a worker after a batch, and waits until the chief goes on without it."""
        self.wait_for(f"{phase} batch {batch}.")
        before = self.log.count(f"{name} was lost")
        again = self._again.pop(name, None)
        os.kill(again.pid if again else self.cluster.pids[name], signal.SIGKILL)
        # At the latest by the steps that come then.
        self.go_on(phase, "killed")
        if not is_last:
            jobs.wait_for(lambda: self.log.count(f"{name} was lost") > before, 120)

    def start_again(self, name):
        """Starts a killed worker again, and waits until the chief has taken it back."""
        path = self.folder / f"{name}-again-{len(list(self.folder.glob('*-again-*')))}"
        log = self.enter_context(path.open("w"))
        env = self.cluster.environment(name)
        process = subprocess.Popen(self._command, env=env, stdout=log, stderr=log)
        self.callback(process.kill)
        before = self.log.count(f"{name} is back")
        self._again[name] = process
        jobs.wait_for(lambda: self.log.count(f"{name} is back") > before, 120)

    def start_chief(self, token):
        """Starts a chief at another address with the same servers; returns its errors."""
        described = json.loads(self.cluster.environment("chief-0")["TF_CONFIG"])
        described["cluster"]["chief"] = [f"127.0.0.1:{free_ports(1)[0]}"]
        env = self.cluster.environment("chief-0") | {"TF_CONFIG": json.dumps(described)} | token
        done = subprocess.run(self._command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stderr
        return done.stderr

    def result(self, phase):
        self.wait_for(f"\nresult of {phase}: ")
        return result_of(phase, self.log)

    def end(self):
        """Waits for the tasks that were started again."""
        for process in self._again.values():
            assert process.wait(30) == 0


def result_of(phase, log):
    """What the chief's log says of a phase."""
    return json.loads(re.search(rf"^result of {phase}: (.*)$", log, re.MULTILINE)[1])


def check_synchronous(found, log, lost, other):
    assert re.search(
        rf"worker-{lost} was lost with batch \d+ .*; worker-{other} takes it once more, and no "
        "gradient counts twice",
        log,
    ), log
    assert re.search(r"batch \d+ .* begins again, because a worker was lost with it", log), log
    assert found["iterations"] == found["steps"] == STEPS
    for name, expected in kill_job.by_hand().items():
        np.testing.assert_allclose(found[name], expected, atol=1e-5, err_msg=name)


def test_synchronous_steps(tmp_path):
    with Job(tmp_path, "apart", "together") as job:
        job.kill("worker-1", "apart", 10)
        job.start_again("worker-1")
        job.go_on("apart", "back")
        found, log = job.result("apart"), job.log
        check_synchronous(found, log, 1, 0)
        assert found["overlapped"] == 0
        # The one that was started again takes all steps at the end.
        job.kill("worker-0", "together", 15)
        job.go_on("together", "back")
        found = job.result("together")
        check_synchronous(found, job.log[len(log) :], 0, 1)
        # While a worker is away, steps do not overlap.
        assert 5 <= found["overlapped"] < STEPS // 2
        job.end()


def check_table(found):
    rows, counts = kill_job.table_by_hand()
    ids, _ = kill_job.keyed()
    assert found["keys"] == sorted(set(ids.ravel().tolist()))
    assert found["counts"] == counts.tolist()
    np.testing.assert_allclose(found["rows"], rows, rtol=1e-5)
    assert found["evaluated"] == len(ids)


@pytest.mark.extended
@pytest.mark.parametrize("between", [(), *extended((("shares", "sums"),))])
def test_asynchronous_steps(between, tmp_path):
    with Job(tmp_path, "steps", *between, "last") as job:
        job.kill("worker-1", "steps", 11)
        job.start_again("worker-1")
        errors = job.start_chief({TOKEN_VARIABLE: ""})
        assert re.search(r"ClusterStartupError: ps-0 \(127.0.0.1:\d+\).*token differs", errors)
        errors = job.start_chief({})
        assert re.search(r"StartupError: ps-0 \(.*serves another chief: chief-0 \(", errors), errors
        job.go_on("steps", "back")
        found = job.result("steps")
        check_table(found)
        lost = r"worker-1 was lost with batch \d+ .*; worker-0 takes it once more"
        assert re.search(lost, job.log), job.log
        # The call under way on a worker is sent again, and may have been applied already.
        assert STEPS <= found["steps"] <= STEPS + 4
        assert STEPS <= found["iterations"] <= STEPS + 4
        if between:
            lose_shares_and_sums(job)
        else:
            job.kill("worker-1", "last", 3)

        job.kill("worker-0", "last", 5, is_last=True)
        job.go_on("last", "back")
        job.wait_for("WorkersLostError: None of the workers")
        assert job.cluster.wait(60).exit_codes["chief-0"] == 1
        assert "Received: heartbeat_timeout=5" in job.log


def lose_shares_and_sums(job):
    """Workers are lost with their shares of the data, and with sums of gradients."""
    job.kill("worker-0", "shares", 10)
    job.go_on("shares", "back")
    found = job.result("shares")
    for power in range(3):
        expected = sum(n**power for n in range(1, kill_job.NUMBERS + 1))
        assert found[f"power_{power}"] == [expected] * 2, power
    # What the compressor keeps began anew on the one that came back.
    assert found["states"] == ["worker-1-of-2"]
    assert "worker-0 cannot be reached: what it has left out of its gradients is" in job.log

    job.start_again("worker-0")
    job.go_on("sums", "begins", "back")
    job.kill("worker-1", "sums", 20)
    found = job.result("sums")
    lost = re.search(r"worker-1 was lost with the gradients of (\d+) batch\(es\)", job.log)
    assert lost and int(lost[1]) > 0, job.log[-4000:]
    # Every batch is with one of them.
    assert found["pending"] == {"0": STEPS - int(lost[1])}
    assert (found["before"], found["iterations"], found["after"]) == ([0.0], 1, [-0.5])


@pytest.mark.extended
def test_steps_that_overlap(tmp_path):
    """Several steps are under way when a worker is lost, and when it is taken back."""
    with Job(tmp_path, "overlapping", "overlapping again") as job:
        for phase, name in (("overlapping", "worker-1"), ("overlapping again", "worker-0")):
            job.kill(name, phase, 11)
            job.start_again(name)
            job.go_on(phase, "back")
            found = job.result(phase)
            check_table(found)
            # Of each worker that was killed, up to three steps are sent again.
            assert STEPS <= found["steps"] <= STEPS + 6
            assert STEPS <= found["iterations"] <= STEPS + 6
        job.end()
