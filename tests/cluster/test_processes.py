"""Real processes of a `LocalCluster`; `test_launcher.py` looks at all ends with simulated ones."""

import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from keras_psplus.cluster import processes
from keras_psplus.cluster.console import Console
from keras_psplus.cluster.processes import LocalCluster
from tests.endings import wait_for_end
from tests.support.jobs import WITHOUT_TENSORFLOW, wait_for

pytestmark = pytest.mark.processes
no_coverage = pytest.mark.skipif(
    "COVERAGE_PROCESS_CONFIG" in os.environ, reason="coverage writes a file in each process"
)
HEAD = """
import json, os, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"
"""
SLEEPS = [sys.executable, "-c", "import time; time.sleep(100)"]


@pytest.fixture
def run(tmp_path):
    """Runs a script, without TensorFlow, in a cluster; 60 s are the hard limit."""

    def run(body, **kwargs):
        script = tmp_path / "script.py"
        script.write_text(HEAD + textwrap.dedent(body))
        kwargs = {"log_dir": tmp_path / "logs", "kill_grace": 2.0, **kwargs}
        with LocalCluster([sys.executable, str(script)], **kwargs) as cluster:
            return cluster.wait(60)

    return run


def sleepers(folder):
    return LocalCluster(SLEEPS, workers=2, log_dir=folder, kill_grace=2)


# A task starts a process in a session of its own, which holds the task's output.
LEAVES = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(1000 if len(sys.argv) > 1 else 0)
"""


def child_of(log):
    wait_for((log, "child "), seconds=30)
    return int(re.search(r"child (\d+)", log.read_text())[1])


def test_what_tasks_have_started_ends_with_a_launcher_that_is_killed(tmp_path):
    launches = f"""
from keras_psplus.cluster.processes import LocalCluster
import sys
command = [sys.executable, "-c", {LEAVES!r}, "stay"]
LocalCluster(command, workers=1, log_dir={str(tmp_path)!r}).start()
import time
time.sleep(1000)
"""
    launcher = subprocess.Popen([sys.executable, "-c", WITHOUT_TENSORFLOW + launches])
    child = child_of(tmp_path / "worker-0.log")
    launcher.kill()
    launcher.wait()
    wait_for_end(child)


def test_what_tasks_have_started_does_not_hold_a_launcher_that_ends_them(tmp_path):
    command = [sys.executable, "-c", LEAVES]
    with LocalCluster([*command, "stay"], workers=1, log_dir=tmp_path, kill_grace=2) as cluster:
        child = child_of(cluster.log_path("worker-0"))
        cluster.stop()
        wait_for_end(child)
    with LocalCluster(command, workers=1, log_dir=tmp_path / "well") as cluster:
        child = child_of(cluster.log_path("worker-0"))
        assert cluster.wait(60).exit_code == 0
    # After a good end it may go on.
    os.kill(child, signal.SIGKILL)


def test_every_task_has_its_tf_config_and_its_output_is_prefixed(run, capsys):
    body = "print(name, len(sys.argv)); print('oops', file=sys.stderr)"
    result = run(body, workers=1, ps=1, chief=True, console=Console())
    names = ["chief-0", "worker-0", "ps-0"]
    assert result.exit_code == 0 and result.exit_codes == dict.fromkeys(names, 0)
    assert result.logs == {name: f"{name} 1\noops\n" for name in names}
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"[{n}] {text}" for n in names for text in (f"{n} 1", "oops"))


@no_coverage
def test_a_full_disk_under_the_logs_stops_nobody(run, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as full as a quota makes it
    try:
        # More than a pipe holds, on one of the workers.
        result = run(
            "print(('x' * 99 + '\\n') * (2000 if name == 'worker-0' else 1)); sys.exit('the cause')"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_codes == {"worker-0": 1, "worker-1": 1}
    assert result.log_paths["worker-0"].stat().st_size == 1000
    assert result.logs["worker-0"].endswith("the cause\n")
    assert result.logs["worker-1"] == "x" * 99 + "\n\nthe cause\n"
    (line,) = capsys.readouterr().err.splitlines()
    assert "worker-0.log ([Errno 27] File too large); the job goes on" in line


@no_coverage
def test_others_report_a_failure_and_are_ended_with_what_they_have_started(run, tmp_path):
    body = f"""
        import subprocess
        if name == "worker-1":
            open({str(tmp_path / "raises")!r}, "w").close()
            raise RuntimeError("the cause")
        while not os.path.exists({str(tmp_path / "raises")!r}):
            time.sleep(0.05)
        time.sleep(0.5)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        print("lost worker-1", flush=True)
        if name == "worker-0":
            sys.exit(1)
        time.sleep(100)
        """
    result = run(body, workers=3, failure_grace=1)
    assert (result.first_failure, result.exit_code) == ("worker-1", 1)
    assert result.terminated == ("worker-2",)
    assert "lost worker-1" in result.logs["worker-0"]
    assert result.tails().rstrip().endswith("RuntimeError: the cause")
    assert "... (" in result.tails(1)
    wait_for_end(int((tmp_path / "pid").read_text()))


def test_command_that_does_not_exist(tmp_path):
    with LocalCluster(["/no/such/program"], workers=1, log_dir=tmp_path) as cluster:
        result = cluster.wait(30)
    assert result.exit_code == 127
    assert "cannot start '/no/such/program'" in result.logs["worker-0"]


def test_leaving_the_block_ends_the_processes_and_restores_signals(tmp_path):
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(ZeroDivisionError), sleepers(tmp_path) as cluster:
            pids = list(cluster.pids.values())
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            _ = 1 / 0
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert signal.getsignal(signal.SIGINT) is before
    for pid in pids:
        wait_for_end(pid)


def test_works_outside_the_main_thread(tmp_path):
    results = []

    def work():
        with sleepers(tmp_path) as cluster:
            results.append(cluster.wait(0.1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert results[0].timed_out


LAUNCHER = f"""{WITHOUT_TENSORFLOW}
from keras_psplus.cluster.processes import LocalCluster
with LocalCluster({SLEEPS!r}, workers=2, log_dir=sys.argv[1], kill_grace=2) as cluster:
    print(*cluster.pids.values(), flush=True)
    sys.exit(cluster.wait(60).exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all(tmp_path, number):
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("needs PR_SET_PDEATHSIG")
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            pids = [int(pid) for pid in launcher.stdout.readline().split()]
            launcher.send_signal(number)
            expected = -number if number == signal.SIGKILL else 128 + number
            assert launcher.wait(30) == expected and len(pids) == 2
            for pid in pids:
                wait_for_end(pid)
        finally:
            launcher.kill()


def test_every_attempt_has_new_ports_and_the_same_logs(tmp_path):
    body = """
    config, attempt = json.loads(os.environ["TF_CONFIG"]), os.environ["KERAS_PSPLUS_RESTART"]
    print("attempt", attempt, config["cluster"]["worker"])
    sys.exit(0 if attempt == "1" else 3)
    """

    def make(restart):
        command = [sys.executable, "-c", HEAD + textwrap.dedent(body)]
        return LocalCluster(command, workers=1, log_dir=tmp_path, restart=restart)

    result = processes.run(make, 5, log=lambda line: None, sleep=lambda seconds: None)
    assert result.exit_code == 0
    first, heading, second = (tmp_path / "worker-0.log").read_text().splitlines()
    assert heading == "keras-psplus: restart 1"
    assert first.startswith("attempt 0 [") and second.startswith("attempt 1 [")
    assert first.partition("[")[2] != second.partition("[")[2]
    # A result is that of its own attempt.
    assert result.logs["worker-0"].startswith("attempt 1 ")
