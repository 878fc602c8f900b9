"""Every kind of strategy, with faults put into it by the launcher: the table of docs/faults.md."""

import pathlib
import re
import signal
import sys
import threading
import time

import pytest

from keras_psplus.chaos import spec
from keras_psplus.chaos.injector import Injector
from keras_psplus.cluster import restarts
from keras_psplus.cluster.environment import plan_tasks, python_path
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.cluster.testing import run_in_processes

JOB = pathlib.Path(__file__).with_name("job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
CLUSTERS = {
    "all_reduce": {"workers": 2},
    "hybrid": {"workers": 2, "ps": 1},
    "sync_ps": {"workers": 2, "ps": 1, "chief": True},
    "async_ps": {"workers": 2, "ps": 1, "chief": True},
}


def leader_of(kind):
    return "chief-0" if "chief" in CLUSTERS[kind] else "worker-0"


class Job:
    """A job with faults, as `keras-psplus run` runs it, that has ended.

    Args:
        folder: For logs and the backup.
        kind: What `job.py` takes.
        faults: What `--chaos` takes. A task that it stops goes on when `waited_for` is there.
        waited_for: Pattern of a line in the leader's log.
    """

    def __init__(self, folder, kind, faults, waited_for):
        self._folder, self.lines = folder, []
        layout = CLUSTERS[kind]
        events = spec.parse(faults, [task.name for task in plan_tasks(**layout)])
        stopped = next(event.task for event in events if event.kind == "stop")
        self._leader, self._waited_for = folder / f"{leader_of(kind)}.log", waited_for
        with Injector(events, self.lines.append) as chaos:

            def make_cluster(restart):
                command = [sys.executable, str(JOB), kind, str(folder), "stall=1"]
                env = {**ENVIRONMENT, **chaos.environment, "PYTHONPATH": python_path()}
                cluster = LocalCluster(command, **layout, env=env, log_dir=folder, restart=restart)
                chaos.watch(cluster)
                if not restart:
                    threading.Thread(
                        target=self._resume, args=(cluster, stopped), daemon=True
                    ).start()
                return cluster

            self.exit_code = restarts.run(
                make_cluster, faults.count("kill"), timeout=560, log=self.lines.append
            ).exit_code
        self.logs = {path.stem: path.read_text() for path in folder.glob("*.log")}
        self.leader = self.logs[leader_of(kind)]
        self.everything = "\n".join([*self.lines, *(log[-4000:] for log in self.logs.values())])

    def _resume(self, cluster, task):
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline:
            if self._leader.exists() and re.search(self._waited_for, self._leader.read_text()):
                break
            time.sleep(0.1)
        cluster.send_signal(task, signal.SIGCONT)

    def assert_said(self, pattern, log):
        assert re.search(pattern, log), f"no {pattern!r}:\n{self.everything}"


@pytest.mark.parametrize(
    ("kind", "faults", "waited_for", "named"),
    [
        (
            "all_reduce",
            "stop:worker1@step=3; kill:worker0@step=17",
            r"worker-0 at training step 4 has waited \d+ s for a collective; "
            r"not arrived: worker-1 \(no answer\)",
            {"worker-1": "PeerLostError: worker-0"},
        ),
        (
            "hybrid",
            "stop:ps0@step=3; kill:worker0@step=17",
            r"worker-0 at training step 4 has waited \d+ s for a table; not arrived: ps-0 "
            r"\(no answer\)",
            {"worker-1": "PeerLostError: worker-0"},
        ),
        (
            "sync_ps",
            "stop:worker1@step=3; kill:ps0@step=17; kill:chief@step=18",
            r"chief-0 at .* has waited \d+ s for .*; not arrived: worker-1 \(no answer",
            {"chief-0": "ParameterServerLostError: ps-0"},
        ),
        (
            "async_ps",
            "stop:ps0@step=3; kill:ps0@step=17",
            r"chief-0 at .* has waited \d+ s for .*; not arrived: .*ps-0 \(no answer\)",
            {"chief-0": "ParameterServerLostError: ps-0"},
        ),
    ],
    ids=list(CLUSTERS),
)
def test_a_job_goes_on_or_resumes(kind, faults, waited_for, named, tmp_path):
    job = Job(tmp_path, kind, faults, waited_for)
    assert job.exit_code == 0, job.everything
    # It waits for a task that was stopped, says for which, and goes on.
    job.assert_said(waited_for, job.leader)
    job.assert_said(r"goes on after \d+ s", job.leader)
    # Every kill ends it, all that notice name the task, and the next start resumes.
    kills = re.findall(r"kill:(\w+?)(\d?)@", faults)
    for number, (task, index) in enumerate(kills, 1):
        job.assert_said(
            rf"{task}-{index or 0} has failed \(ended by signal 9\); restart {number} of "
            rf"{len(kills)} begins",
            "\n".join(job.lines),
        )
    for task, message in named.items():
        job.assert_said(message, job.logs[task])
    assert "keras-psplus: restart" in job.leader
    *_, last = job.leader.split("keras-psplus: restart")
    assert "epoch 0" not in last, job.everything
    # All updates count once, those before the kills too.
    found = re.search(r"end iterations=(\d+) off=(\S+)", last)
    assert found, job.everything
    assert int(found[1]) == 30
    if kind != "async_ps":
        assert float(found[2]) < 1e-6


@pytest.mark.parametrize(
    ("kind", "missing", "message"),
    [
        ("all_reduce", "worker-1", r"Here: worker-0 [^\0]*Missing:\s+worker-1 at 127.0.0.1:"),
        ("async_ps", "ps-0", r"Here: chief-0 [^\0]*Missing:\s+ps-0 at 127.0.0.1:"),
        ("hybrid", "ps-0", r"ps-0 did not come to 127.0.0.1:\d+ within 3 s"),
    ],
)
def test_a_task_that_does_not_come_is_named(kind, missing, message, tmp_path):
    result = run_in_processes(
        JOB,
        **CLUSTERS[kind],
        args=[kind, tmp_path, "timeout=3", f"missing={missing}"],
        env=ENVIRONMENT,
        timeout=90,
        expect_failure=True,
        # Tasks are not equally fast to start, and each has to say it.
        failure_grace=30,
    )
    log = result.logs[leader_of(kind)]
    assert re.search(rf"ClusterStartupError: [^\0]*{message}", log), log[-3000:]
    assert "Received: " in log
