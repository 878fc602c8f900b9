import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from keras_psplus.cluster.environment import plan_tasks
from keras_psplus.cluster.launcher import kernel_kills
from keras_psplus.cluster.launcher.results import ClusterResult
from keras_psplus.cluster.monitor.job_record import JobRecord
from keras_psplus.cluster.output.console import Console
from keras_psplus.cluster.processes import LocalCluster

HEAD = """
import json, os, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script, without TensorFlow, in a cluster; 60 s are the hard limit."""

    def run(body, timeout=60, **kwargs):
        script = tmp_path / "script.py"
        script.write_text(HEAD + textwrap.dedent(body))
        kwargs = {"log_dir": tmp_path / "logs", "kill_grace": 2.0, **kwargs}
        with LocalCluster([sys.executable, str(script)], **kwargs) as cluster:
            return cluster.wait(timeout)

    return run


def test_every_task_gets_its_tf_config(run):
    result = run("print(name, len(sys.argv))", workers=1, ps=1, chief=True)
    assert result.exit_code == 0
    assert result.logs == {"chief-0": "chief-0 1\n", "worker-0": "worker-0 1\n", "ps-0": "ps-0 1\n"}
    assert result.exit_codes == {"chief-0": 0, "worker-0": 0, "ps-0": 0}


def test_output_is_prefixed(run, capsys):
    run("print('hello'); print('oops', file=sys.stderr)", workers=2, console=Console())
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(
        f"[worker-{index}] {text}" for index in range(2) for text in ("hello", "oops")
    )


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


def test_threads_are_split_unless_the_user_says_otherwise(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("keras_psplus.cluster.environment.available_cores", lambda: 12)
    (first, *_, ps) = plan_tasks(workers=3, ps=1)
    assert first.variables["OMP_NUM_THREADS"] == ps.variables["TF_NUM_INTRAOP_THREADS"] == "4"
    (first, *_) = plan_tasks(workers=24)
    assert first.variables["TF_NUM_INTRAOP_THREADS"] == "1"
    assert first.variables["TF_NUM_INTEROP_THREADS"] == "2"
    (first, *_) = plan_tasks(workers=3, environ={"OMP_NUM_THREADS": "7"})
    assert "OMP_NUM_THREADS" not in first.variables


def test_hosts_get_default_ports():
    hosts = ["a", "b:99", "b", "b", "[::1]"]
    tasks = plan_tasks(workers=3, ps=1, chief=True, hosts=hosts)
    addresses = [task.config.address for task in tasks]
    assert addresses == ["a:2222", "b:99", "b:2222", "b:2223", "[::1]:2222"]
    assert all(set(task.variables) == {"TF_CONFIG"} for task in tasks)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"workers": 0}, "at least one worker"),
        ({"workers": -1, "chief": True}, "at least one worker"),
        ({"workers": 2, "hosts": ["a"]}, "2 tasks .*Received: hosts=a"),
        ({"workers": 2, "hosts": ["a:1", "a:1"]}, "same|Two tasks"),
    ],
)
def test_impossible_clusters_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan_tasks(**kwargs)


def test_failure_ends_the_others_and_its_code_is_passed_on(run):
    result = run(
        """
        if name == "worker-1":
            time.sleep(0.3)
            sys.exit(7)
        time.sleep(100)
        """,
        workers=2,
        failure_grace=0.5,
    )
    assert (result.first_failure, result.exit_code) == ("worker-1", 7)
    assert result.terminated == ("worker-0",)


def test_who_was_ended_for_want_of_memory_is_named(run, monkeypatch, tmp_path, capfd):
    statistics = tmp_path / "vmstat"
    statistics.write_text("pgfault 1\noom_kill 3\n")
    monkeypatch.setattr(kernel_kills, "_STATISTICS", statistics)
    body = f"""
        if name == "worker-1":
            open({str(statistics)!r}, "w").write("oom_kill 4")
            os.kill(os.getpid(), 9)
        time.sleep(100)
        """
    result = run(body, workers=2, failure_grace=0.1)
    assert result.how_it_failed == "ended by signal 9, by the kernel for want of memory"
    assert result.exit_code == 137
    # Another end by this signal is not.
    result = run("os.kill(os.getpid(), 9)", workers=1)
    assert result.how_it_failed == "ended by signal 9"


def test_others_have_time_to_report_the_failure(run):
    result = run(
        """
        if name == "worker-1":
            raise RuntimeError("the cause")
        time.sleep(1)
        raise RuntimeError("lost worker-1")
        """,
        workers=2,
        failure_grace=20,
    )
    assert result.first_failure == "worker-1"
    assert "lost worker-1" in result.logs["worker-0"]
    assert result.tails().rstrip().endswith("RuntimeError: the cause")
    assert "... (" in result.tails(1)


def test_others_that_have_said_what_they_saw_are_not_waited_for(run, tmp_path):
    body = """
        if name == "worker-2":
            os.kill(os.getpid(), 9)
        # As one that stays for the sake of others.
        print("what it saw")
        open(f"{os.environ['KERAS_PSPLUS_JOB_DIR']}/{name}.failed", "w").close()
        time.sleep(100)
        """
    with JobRecord(["script.py"], {"worker": 3}, tmp_path) as record:
        options = {"env": record.environment, "record": record}
        result = run(body, workers=3, failure_grace=90, **options)
        assert result.exit_code == 128 + 9 and not result.timed_out
        assert sorted(result.terminated) == ["worker-0", "worker-1"]
        # Nor asked to end, which TensorFlow would not hear.
        assert set(result.exit_codes.values()) == {-signal.SIGKILL}
        assert result.logs["worker-1"] == "what it saw\n"
        # The next attempt has not said anything.
        assert record.have_failed(["worker-0", "worker-1"])
        record.begin_attempt(1)
        assert not record.have_failed(["worker-0"])


def test_who_only_serves_is_not_waited_for_when_the_chief_has_failed(run, tmp_path):
    body = """
        from keras_psplus.cluster.monitor import task_report
        if name == "chief-0":
            while "serves" not in "".join(os.listdir(os.environ["KERAS_PSPLUS_JOB_DIR"])):
                time.sleep(0.05)
            sys.exit(1)
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        task_report.current().serves()
        time.sleep(100)
        """
    with JobRecord(["script.py"], {"chief": 1, "worker": 1}, tmp_path) as record:
        options = {"env": record.environment, "record": record, "kill_grace": 90}
        result = run(body, chief=True, workers=1, failure_grace=90, idle_grace=0.1, **options)
        assert result.exit_codes == {"chief-0": 1, "worker-0": -signal.SIGKILL}
        assert not result.timed_out
        record.begin_attempt(1)
        assert not record.is_serving("worker-0")


@pytest.mark.parametrize(("end", "terminated"), [("sys.exit(1)", True), ("os.kill(pid, 9)", False)])
def test_others_have_less_time_if_a_task_said_what_was_wrong(run, end, terminated):
    body = f"""
        pid = os.getpid()
        if name == "worker-1":
            {end}
        time.sleep(100 if {terminated} else 2)
        """
    result = run(body, workers=2, failure_grace=50, error_grace=0.2)
    assert result.first_failure == "worker-1"
    assert result.terminated == (("worker-0",) if terminated else ())


def test_tasks_that_serve_those_that_have_ended_end_soon(run):
    body = """
        if name == "worker-0":
            sys.exit(1)
        time.sleep(100 if name == "ps-0" else 1)
        """
    started = time.monotonic()
    result = run(body, workers=2, ps=1, failure_grace=50, idle_grace=0.2)
    assert time.monotonic() - started < 40
    # What computes has the whole grace, and what serves it as well until then.
    assert (result.exit_codes["worker-1"], result.terminated) == (0, ("ps-0",))
    result = run(body.replace("worker-0", "chief-0"), chief=True, ps=1, idle_grace=0.2)
    assert result.terminated == ("worker-0", "worker-1", "ps-0")


def test_task_killed_by_a_signal(run):
    result = run("os.kill(os.getpid(), 9)", workers=1)
    assert (result.exit_codes, result.exit_code) == ({"worker-0": -9}, 137)


def test_task_that_ignores_sigterm_is_killed(run):
    started = time.monotonic()
    result = run(
        "import signal; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(100)",
        workers=1,
        timeout=1.5,
        kill_grace=0.5,
    )
    assert result.timed_out and result.exit_code == 124
    assert result.exit_codes == {"worker-0": -9}
    assert time.monotonic() - started < 30


def test_children_of_a_task_end_with_the_cluster(run, tmp_path):
    body = f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        """
    assert run(body, workers=1).exit_code == 0
    assert _gone(int((tmp_path / "pid").read_text()))


def test_ps_that_serves_on_is_ended_without_failure(run):
    result = run("time.sleep(100 if name == 'ps-0' else 0)", workers=1, ps=1, server_grace=0.3)
    assert (result.exit_code, result.terminated) == (0, ("ps-0",))


KILLED_PS = """
import signal
ended = os.path.join(os.environ["FOLDER"], "ended")
if task["type"] == "ps":
    while not os.path.exists(ended):
        time.sleep(0.02)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIG{signal})
elif name == {chief!r}:
    open(ended, "w").close()
    sys.exit({code})
elif task["type"] == "worker":
    time.sleep(1.5)
"""


@pytest.mark.parametrize("chief, signal_", [(True, "KILL"), (False, "TERM")])
def test_a_ps_that_is_killed_after_a_good_end_is_no_failure(run, tmp_path, capsys, chief, signal_):
    first = "chief-0" if chief else "worker-0"
    body = KILLED_PS.format(signal=signal_, chief=first, code=0)
    env, number = {"FOLDER": str(tmp_path)}, getattr(signal, f"SIG{signal_}")
    result = run(body, workers=2, ps=1, chief=chief, env=env, console=Console())
    assert result.exit_codes["ps-0"] == -number
    assert (result.exit_code, result.first_failure, result.terminated) == (0, None, ())
    said = f"ps-0 has ended (ended by signal {number:d}) after {first} has ended well: no failure"
    assert said in capsys.readouterr().out


def test_a_ps_that_is_killed_after_a_bad_end_or_before_is_a_failure(run, tmp_path):
    body = KILLED_PS.format(signal="KILL", chief="chief-0", code=3)
    result = run(body, workers=1, ps=1, chief=True, env={"FOLDER": str(tmp_path)})
    assert (result.exit_code, result.first_failure) == (3, "chief-0")
    body = "os.kill(os.getpid(), 9) if name == 'ps-0' else time.sleep(1)"
    result = run(body, workers=1, ps=1, chief=True)
    assert (result.exit_code, result.first_failure) == (137, "ps-0")


def test_a_worker_that_is_killed_at_the_end_of_its_chief_is_no_failure(run):
    body = "time.sleep(0.3) if name != 'worker-1' else os.kill(os.getpid(), 9)"
    result = run(body, workers=2, ps=1, chief=True, server_grace=0.1, worker_grace=0.1)
    assert result.exit_codes["worker-1"] == -9
    assert result.exit_code == 0
    result = run(body, workers=2)
    assert (result.exit_code, result.first_failure) == (137, "worker-1")


def test_ps_may_end_by_itself(run):
    result = run("time.sleep(0.5 * (name == 'ps-0'))", workers=1, ps=1, server_grace=30)
    assert (result.exit_code, result.terminated) == (0, ())


def test_workers_that_serve_a_chief_have_time_of_their_own(run):
    body = "time.sleep({'chief': 0, 'worker': 1, 'ps': 100}[task['type']]); print('end')"
    kwargs = {"workers": 1, "ps": 1, "chief": True, "server_grace": 0.1}
    result = run(body, worker_grace=30, **kwargs)
    assert (result.exit_code, result.terminated) == (0, ("ps-0",))
    result = run(body.replace("1,", "100,"), worker_grace=0.2, **kwargs)
    assert (result.exit_code, result.terminated) == (0, ("worker-0", "ps-0"))


def test_command_that_does_not_exist(tmp_path):
    with LocalCluster(["/no/such/program"], workers=1, log_dir=tmp_path) as cluster:
        result = cluster.wait(30)
    assert result.exit_code == 127
    assert "cannot start '/no/such/program'" in result.logs["worker-0"]


def test_leaving_the_block_ends_the_processes(tmp_path):
    with pytest.raises(ZeroDivisionError), _sleepers(tmp_path) as cluster:
        pids = list(cluster.pids.values())
        _ = 1 / 0
    assert all(_gone(pid) for pid in pids)


def test_works_outside_the_main_thread(tmp_path):
    results = []

    def work():
        with _sleepers(tmp_path) as cluster:
            results.append(cluster.wait(0.5))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert results[0].timed_out


def test_signal_handlers_are_restored(run):
    before = signal.getsignal(signal.SIGINT)
    run("", workers=1)
    assert signal.getsignal(signal.SIGINT) is before


def test_ignored_signals_stay_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with _sleepers(tmp_path):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_launcher_ends_all(tmp_path, number):
    launcher, pids = _launcher(tmp_path)
    with launcher:
        try:
            launcher.send_signal(number)
            assert launcher.wait(30) == 128 + number
            assert all(_gone(pid) for pid in pids)
        finally:
            launcher.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_death_of_the_launcher_ends_all(tmp_path):
    launcher, pids = _launcher(tmp_path)
    with launcher:
        launcher.kill()
        launcher.wait(30)
        assert all(_gone(pid) for pid in pids)


def test_result_of_a_task_that_never_started():
    result = ClusterResult({}, {})
    assert (result.exit_code, result.how_ended("worker-0")) == (0, "not started")


def _sleepers(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    return LocalCluster(command, workers=2, log_dir=tmp_path, kill_grace=2)


def _launcher(tmp_path):
    code = f"""
import sys
from keras_psplus.cluster.processes import LocalCluster
command = [sys.executable, "-c", "import time; time.sleep(100)"]
with LocalCluster(command, workers=2, log_dir={str(tmp_path)!r}, kill_grace=2) as cluster:
    print(*cluster.pids.values(), flush=True)
    sys.exit(cluster.wait(60).exit_code)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return launcher, [int(pid) for pid in launcher.stdout.readline().split()]


def _gone(pid, within=15):
    """Whether the process ends in time; a zombie that init has not reaped yet has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False
