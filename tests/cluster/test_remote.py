"""`keras-psplus run --hosts` over ssh: two addresses of this machine, by OpenSSH's own server."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

import keras_psplus
from keras_psplus.cluster import environment
from keras_psplus.cluster.launcher import remote
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.preflight import is_local
from tests.cluster import sshd

ROOT = str(pathlib.Path(next(iter(keras_psplus.__path__))).parent)
# Says what it has, with a child in a session of its own, and ends as it is told.
SCRIPT = """
import glob, json, os, subprocess, sys, time
seconds, code = float(sys.argv[1]), int(sys.argv[2])
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
token, seen = os.environ["KERAS_PSPLUS_JOB_TOKEN"].encode(), 0
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        seen += token in open(path, "rb").read()
    except OSError:
        pass
start = os.environ["KERAS_PSPLUS_RESTART"]
print(f"here {os.getcwd()} start {start} pids {os.getpid()} {child.pid} seen {seen}", flush=True)
if index == 1 or seconds > 9:
    time.sleep(seconds)
if index == 1 and code and start == "0":
    sys.exit(code) if code > 0 else os.kill(os.getpid(), -code)
if not code:
    child.kill()
"""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    with sshd.server(tmp_path_factory.mktemp("sshd")) as command:
        yield command


@pytest.fixture
def start(ssh, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    started = []

    def start(*flags, script=("1", "0"), ssh=ssh, name="train.py", **options):
        hosts = ",".join(f"127.0.0.{n}:{port}" for n, port in enumerate(free_ports(2), 1))
        command = [sys.executable, "-m", "keras_psplus", "run", f"--ssh={ssh}", "--hosts", hosts]
        process = subprocess.Popen(
            [*command, *flags, name, *script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ROOT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def pids_of(text):
    return [int(pid) for pair in re.findall(r"pids (\d+) (\d+)", text) for pid in pair]


def assert_ended(pids):
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if pathlib.Path(f"/proc/{pid}/cmdline").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def children_of(pid):
    paths = pathlib.Path("/proc").glob("[0-9]*/stat")
    stats = [(path.parent.name, path.read_text("latin-1").rpartition(")")[2]) for path in paths]
    return [int(child) for child, fields in stats if int(fields.split()[1]) == pid]


def command_of(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def lines_of(process, number):
    """Reads lines until so many tasks have said what they have."""
    lines = []
    while sum("pids" in line for line in lines) < number:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    return "".join(lines)


def test_both_hosts_run_the_script_and_restart_it(start, tmp_path):
    process = start("--max_restarts=2", script=("0.5", "5"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    said = re.findall(r"\[worker-(\d)@127.0.0.(\d)\] here (\S+) start (\d) .* seen 0$", out, re.M)
    # In the same folder, with the secret, which no command line shows.
    expected = [(str(n), str(n + 1), str(tmp_path), s) for s in "01" for n in range(2)]
    assert sorted(said, key=lambda each: each[3:] + each[:1]) == expected
    assert "worker-1 has failed (exit code 5); restart 1 of 2 begins" in out


def test_a_killed_task_ends_the_others(start):
    process = start(script=("1", "-9"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 137, out
    assert "worker-1: ended by signal 9, first to fail" in out
    assert_ended(pids_of(out))


@pytest.mark.parametrize("how", ["interrupt", "kill the launcher", "cut the connection"])
def test_nothing_stays(start, how):
    process = start(script=("600", "0"))
    out = lines_of(process, 2)
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
        code = 130
    elif how == "kill the launcher":
        process.kill()
        code = -signal.SIGKILL
    else:
        (pid,) = [pid for pid in children_of(process.pid) if b"127.0.0.2" in command_of(pid)]
        os.kill(pid, signal.SIGKILL)
        code = 255
    more, _ = process.communicate(timeout=30)
    assert process.returncode == code, more
    assert ("the connection to worker-1@127.0.0.2 was lost" in more) == (code == 255)
    assert_ended(pids_of(out))


def test_a_host_that_cannot_start_a_task(start, tmp_path):
    hang = tmp_path / "hang"
    hang.write_text("#!/bin/sh\nexec sleep 600\n")
    hang.chmod(0o755)
    with socket.create_server(("0.0.0.0", 0)) as silent:
        cases = {
            "refuses": (["--max_restarts=0"], "ssh -F /dev/null -p 1", 255, "Connection refused"),
            "hangs": (
                ["--start_timeout=4"],
                f"ssh -F /dev/null -p {silent.getsockname()[1]}",
                255,
                "timed out",
            ),
            "hangs later": (["--start_timeout=2"], str(hang), 255, "not started within 2 s"),
            "another Python": (["--remote_python=/no/python"], None, 127, "/no/python"),
        }
        if shutil.which("ssh") is None:
            del cases["refuses"], cases["hangs"]
        running = {
            name: start(*flags, **({} if ssh is None else {"ssh": ssh}))
            for name, (flags, ssh, _, _) in cases.items()
        }
        for name, (_, _, code, message) in cases.items():
            out, _ = running[name].communicate(timeout=60)
            assert running[name].returncode == code, (name, out)
            assert message in out and "@127.0.0." in out, (name, out)
            assert "-m keras_psplus --version" in out, (name, out)


def test_a_task_ends_after_a_silence(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    silence = (
        "import sys; from keras_psplus.cluster.launcher import remote; "
        "from keras_psplus.cli import remote_task; remote.SILENCE_SECONDS = 1.0; "
        "sys.exit(remote_task.main([]))"
    )
    request = {
        "argv": ["train.py", "600", "0"],
        "environ": {
            "TF_CONFIG": '{"task": {"index": 1}}',
            "KERAS_PSPLUS_JOB_TOKEN": "secret",
            "KERAS_PSPLUS_RESTART": "0",
        },
        "mirrored": [],
        "has_input": False,
        "counts": {"worker": 1},
        "place": ["worker", 0],
        "has_ps": False,
        "gpus_per_worker": None,
    }
    program = (
        f"import sys, os; sys.argv[0] = 'keras-psplus'; sys.path.insert(0, {ROOT!r}); {silence}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    out = process.stdout.read()
    assert process.wait(30) == 137, out
    assert_ended(pids_of(out))
    process.stdin.close()
    process.stdout.close()


def test_hosts_of_a_line_and_of_a_file(tmp_path):
    expanded = ["A", "A", "me@B", "C:2300", "[::1]", "[::1]", "[::1]:2222"]
    assert remote.expand(["A:2", "me@B", "C:2300", "[::1]:2", "[::1]:2222"]) == expanded
    path = tmp_path / "hosts"
    path.write_text("# two machines\nA slots=2 max_slots=4\n\nB # one\n")
    assert remote.read_hostfile(str(path)) == ["A", "A", "B"]
    path.write_text("A two\n")
    with pytest.raises(ValueError, match=r"as in `A slots=2`. Received: 'A two', in line 1 of"):
        remote.read_hostfile(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        remote.read_hostfile(str(tmp_path / "none"))


def test_tasks_of_a_host_share_its_cores_and_gpus():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}

    def share(job, index, counts, **options):
        found = environment.share_of_host(counts, (job, index), environ, **options)
        return found["CUDA_VISIBLE_DEVICES"], int(found["OMP_NUM_THREADS"])

    cores = environment.available_cores()
    assert share("worker", 1, {"worker": 2}) == ("1", max(1, cores // 2))
    assert share("worker", 0, {"worker": 1}) == ("0,1", cores)
    assert share("worker", 0, {"worker": 1}, gpus_per_worker=1) == ("0", cores)
    # A chief of parameter servers elsewhere takes none.
    assert share("chief", 0, {"chief": 1}, has_ps=True) == ("", cores)


def test_doctor_says_what_would_fail(ssh, tmp_path):
    """A port that is taken on both addresses, and a host that nobody has."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        free, other = free_ports(2)
        third = "[::1]" if is_local("::1") else "127.0.0.3"
        hosts = f"127.0.0.1:{port},127.0.0.2:{free},{third}:{other}"
        command = [sys.executable, "-m", "keras_psplus", "doctor", "--ssh", ssh, "--hosts"]
        environ = {**os.environ, "PYTHONPATH": ROOT}
        options = {"cwd": tmp_path, "env": environ, "text": True, "stdout": subprocess.PIPE}
        taken = subprocess.Popen([*command, hosts], **options)
        unknown = subprocess.Popen([*command, "127.0.0.1,no-such-host.invalid"], **options)
        out, _ = taken.communicate(timeout=60)
    assert taken.returncode == 1, out
    assert f"127.0.0.1 cannot listen on port {port}: Address already in use" in out, out
    # The other ports are open, both ways.
    assert "cannot reach" not in out and "1 problem(s)" in out, out
    links = re.findall(r"^  (\S+ -> \S+) +[\d,.]+ Mbit/s, round trip [\d.]+ ms$", out, re.MULTILINE)
    names = ["127.0.0.1", "127.0.0.2", third.strip("[]")]
    assert sorted(links) == [f"{a} -> {b}" for a in names for b in names if a != b], out
    out, _ = unknown.communicate(timeout=60)
    assert unknown.returncode == 1 and "no-such-host.invalid NO ANSWER" in out, out
    assert "Could not resolve hostname" in out or ssh.endswith("/ssh"), out


TRAINING = """
import keras, numpy as np
import keras_psplus as psp

strategy = psp.strategy_from_env()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
history = model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=16, epochs=3, verbose=0)
print("loss", history.history["loss"][-1])
"""


@pytest.mark.extended
def test_two_hosts_train_and_report(start, tmp_path):
    (tmp_path / "fit.py").write_text(TRAINING)
    files = ["--json_log=job.jsonl", "--trace=trace.json", "--trace_steps=3"]
    process = start(*files, name="fit.py", script=())
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    losses = dict(re.findall(r"\[(worker-\d)@\S+\] loss (\S+)", out))
    assert len(losses) == 2 and len(set(losses.values())) == 1, out
    lines = [json.loads(line) for line in (tmp_path / "job.jsonl").read_text().splitlines()]
    assert {line["task"] for line in lines if line["event"] == "steps"} == {"worker-0", "worker-1"}
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len({span["pid"] for span in spans if span["ph"] == "X"}) == 2
