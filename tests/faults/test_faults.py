"""Every kind of strategy, with faults put into it: the table of docs/failures.md."""

import pathlib
import re
import signal
import sys
import threading

import pytest

from keras_psplus.cluster import processes
from keras_psplus.cluster.environment import plan_tasks
from keras_psplus.cluster.processes import LocalCluster
from tests.lab import netlab
from tests.lab.faults import Injector, parse
from tests.support.jobs import environment, run_in_processes, wait_for
from tests.support.tiers import extended

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("job.py")
CLUSTERS = {
    "all_reduce": {"workers": 2},
    "hybrid": {"workers": 2, "ps": 1},
    "sync_ps": {"workers": 2, "ps": 1, "chief": True},
    "async_ps": {"workers": 2, "ps": 1, "chief": True},
}
# Of each kind: faults, what the leader says of the task that is stopped, and what a task that goes
# on says of one that is killed. `test_sizes.py` kills each kind as well.
FAULTS = {
    "all_reduce": (
        "stop:worker1@step=3; kill:worker0@step=17",
        r"worker-0 at training step 4 has waited \d+ s for a collective; not arrived: worker-1 "
        r"\(no answer\)",
        ("worker-1", "PeerLostError: worker-0"),
    ),
    "hybrid": (
        "stop:ps0@step=3; kill:worker0@step=17",
        r"worker-0 at training step 4 has waited \d+ s for a table; not arrived: ps-0 "
        r"\(no answer\)",
        ("worker-1", "PeerLostError: worker-0"),
    ),
    "sync_ps": (
        "stop:worker1@step=3; kill:ps0@step=17; kill:chief@step=18",
        r"chief-0 at .* has waited \d+ s for .*; not arrived: worker-1 \(no answer",
        ("chief-0", "ParameterServerLostError: ps-0"),
    ),
    "async_ps": (
        "stop:ps0@step=3; kill:ps0@step=17",
        r"chief-0 at .* has waited \d+ s for .*; not arrived: .*ps-0 \(no answer\)",
        ("chief-0", "ParameterServerLostError: ps-0"),
    ),
}


def leader_of(kind):
    return "chief-0" if "chief" in CLUSTERS[kind] else "worker-0"


def run(folder, kind, faults, waited_for):
    """A job as `keras-psplus run` runs it; the task that is stopped goes on when that is said.

    Returns:
        The result, what the launcher has said, and what the tasks have.
    """
    layout, lines, leader = CLUSTERS[kind], [], folder / f"{leader_of(kind)}.log"
    events = parse(faults, [task.name for task in plan_tasks(**layout)])
    stopped = next(event.task for event in events if event.kind == "stop")

    def resume(cluster):
        try:
            is_said = lambda: leader.exists() and re.search(waited_for, leader.read_text())  # noqa: E731
            wait_for(is_said, 150)
        finally:
            cluster.send_signal(stopped, signal.SIGCONT)

    with Injector(events, lines.append) as injector:

        def make_cluster(restart):
            command = [sys.executable, str(JOB), kind, str(folder), "stall=1"]
            env = environment(**injector.environment)
            cluster = LocalCluster(command, **layout, env=env, log_dir=folder, restart=restart)
            injector.watch(cluster)
            if not restart:
                threading.Thread(target=resume, args=[cluster], daemon=True).start()
            return cluster

        kills = faults.count("kill")
        result = processes.run(make_cluster, kills, timeout=560, log=lines.append)
    return result, "\n".join(lines), {path.stem: path.read_text() for path in folder.glob("*.log")}


@pytest.mark.parametrize("kind", ["async_ps", *extended("all_reduce", "hybrid", "sync_ps")])
def test_a_job_goes_on_or_resumes(kind, tmp_path):
    faults, waited_for, (witness, message) = FAULTS[kind]
    result, said, logs = run(tmp_path, kind, faults, waited_for)
    leader = logs[leader_of(kind)]
    everything = "\n".join([said, *(log[-4000:] for log in logs.values())])
    assert result.exit_code == 0, everything
    # It waits for a task that was stopped, says for which, and goes on.
    assert re.search(waited_for, leader) and re.search(r"goes on after \d+ s", leader), everything
    # Every kill ends it, a task that notices names the other, and the next start resumes.
    kills = re.findall(r"kill:(\w+?)(\d?)@", faults)
    for number, (task, index) in enumerate(kills, 1):
        failed = f"{task}-{index or 0} has failed (ended by signal 9); restart {number} of "
        assert f"{failed}{len(kills)} begins" in said, everything
    assert message in logs[witness], everything
    assert "keras-psplus: restart" in leader
    *_, last = leader.split("keras-psplus: restart")
    assert "epoch 0" not in last, everything
    # All updates count once, those before the kills too.
    found = re.search(r"end iterations=(\d+) off=(\S+)", last)
    assert found, everything
    assert int(found[1]) == 30 and (kind == "async_ps" or float(found[2]) < 1e-6)


@pytest.mark.parametrize(
    ("kind", "missing", "message"),
    [
        ("hybrid", "ps-0", r"ps-0 did not come to 127.0.0.1:\d+ within 3 s"),
        # What a strategy says of these is that of `test_preflight.py`.
        *extended(
            ("all_reduce", "worker-1", r"Here: worker-0 [^\0]*Missing:\s+worker-1 at 127.0.0.1:"),
            ("async_ps", "ps-0", r"Here: chief-0 [^\0]*Missing:\s+ps-0 at 127.0.0.1:"),
        ),
    ],
)
def test_a_task_that_does_not_come_is_named(kind, missing, message, tmp_path):
    result = run_in_processes(
        JOB,
        *(kind, tmp_path, "timeout=3", f"missing={missing}"),
        **CLUSTERS[kind],
        timeout=90,
        expect_failure=True,
        # Tasks are not equally fast to start, and each has to say it.
        failure_grace=30,
    )
    log = result.logs[leader_of(kind)]
    assert re.search(rf"ClusterStartupError: [^\0]*{message}", log), log[-3000:]
    assert "Received: " in log


@pytest.mark.extended
def test_a_job_goes_on_over_a_link_that_was_slow_and_cut(tmp_path):
    problem = netlab.why_not(delay=1e-3)
    if problem is not None:
        pytest.skip(f"no network namespaces here: {problem}")
    delay, cut = "delay:worker1@step=3,ms=500,for=1", "cut:worker1@step=12,for=2"
    events = parse(f"{cut}; {delay}", [task.name for task in plan_tasks(workers=2)])
    lines, leader = [], tmp_path / "worker-0.log"

    def log(line):
        lines.append((line, re.findall(r"^epoch (\d)", leader.read_text(), re.MULTILINE)))

    with Injector(events, log) as injector:
        cluster = LocalCluster(
            [sys.executable, str(JOB), "all_reduce", str(tmp_path)],
            workers=2,
            env=environment(**injector.environment),
            log_dir=tmp_path,
            network=netlab.Lab(2),
        )
        injector.watch(cluster)
        with cluster:
            result = cluster.wait(200)
    assert result.exit_code == 0 and not result.timed_out, result.tails(60)
    # The epoch of 10 steps did not end before the fault was over.
    assert lines == [
        (f"fault: {delay} comes after step 3", ["0"]),
        (f"fault: {delay} is over", ["0"]),
        (f"fault: {cut} comes after step 12", ["0", "1"]),
        (f"fault: {cut} is over", ["0", "1"]),
    ], result.tails(60)
    for log in result.logs.values():
        found = re.search(r"end iterations=30 off=(\S+)", log)
        assert found and float(found[1]) < 1e-6, result.tails(60)
