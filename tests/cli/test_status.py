"""`run --json_log`, `run --trace` and `status`, on jobs that lose and wait for workers."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

from keras_psplus import process_identity
from keras_psplus.cli import main
from keras_psplus.cluster.monitor import job as job_folder
from keras_psplus.cluster.monitor.job import JsonLog
from tests.cluster.test_trace import check as check_trace
from tests.lab import run as lab_run
from tests.support.tables import for_each

JOB = pathlib.Path(__file__).with_name("status_job.py")


@pytest.fixture(autouse=True)
def no_other_jobs(tmp_path, monkeypatch):
    """Jobs of others do not come into these tests."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    # Not pytest's, whose path is too long for a socket; `tmp_path` has made that before.
    with tempfile.TemporaryDirectory(prefix="psp_") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_job(folder, faults, *flags, kind):
    log = folder / "log.jsonl"
    flags = [f"--log_dir={folder}/logs", f"--json_log={log}", "--timeout=120", *flags]
    code = lab_run.main([faults, *flags, str(JOB), str(folder), kind])
    assert code == 0, (folder / "logs" / "worker-0.log").read_text()[-3000:]
    lines = read(log)
    assert (lines[0]["event"], lines[-1]["event"]) == ("job_started", "job_ended")
    assert lines[-1]["exit_code"] == 0
    assert not list(job_folder.root().iterdir())  # The launcher removes its own.
    return lines, json.loads((folder / "status.json").read_text())


def of(lines, event, task=None):
    """Lines of an event, and of a task."""
    return [line for line in lines if line["event"] == event and task in (None, line.get("task"))]


@pytest.mark.processes
def test_a_worker_that_is_waited_for_and_killed(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    flags = ["--workers=2", "--max_restarts=1", f"--trace={trace}", "--trace_steps=6"]
    lines, jobs = run_job(tmp_path, "stop:worker1@step=6,for=4", *flags, kind="all_reduce")
    printed = capsys.readouterr()
    assert "goodput" in printed.out + printed.err
    # Worker-1 may have waits of its own, once it goes on, and have taken further steps before.
    begin = next(i for i, line in enumerate(lines) if "(no answer)" in line.get("message", ""))
    said = r"worker-0 at training step (\d+) waits for a collective; not arrived: worker-1 "
    found = re.match(said, lines[begin]["message"])
    assert found and int(found[1]) >= 7, lines[begin]["message"]
    stall = jobs[0]["tasks"]["worker-0"]["stall"]
    ends = [line["seconds"] for line in of(lines[begin:], "stall_over", "worker-0")]
    assert stall["is_over"] and stall["seconds"] in ends and max(ends) >= 1
    for task in ("worker-0", "worker-1"):
        assert all(line["bytes_sent"] == 4 * 36 for line in of(lines, "steps", task))
    ends = [of(lines, "epoch_end", task) for task in ("worker-0", "worker-1")]
    assert all({"loss", "mae"} <= set(line["logs"]) for one in ends for line in one)
    # Both are at the same weights.
    first, second = ({line["step"]: line["loss"] for line in one} for one in ends)
    assert first == second
    check_goodput(lines[-1]["goodput"])
    for spans in check_trace(json.loads(trace.read_text()), ["worker-0", "worker-1"]).values():
        names = {e["name"] for e in spans}
        assert {"step", "read", "compute", "update"} <= names and names & {"send", "wait"}
        steps = [e for e in spans if e["name"] == "step"]
        assert len(steps) == 6
        # All on one clock, within the job.
        assert max(e["ts"] + e["dur"] for e in steps) / 1e6 < lines[-1]["goodput"]["wall_s"]


def check_goodput(goodput):
    assert goodput["restarts"] == 1
    # Those after the last backup, of one after every fifth step, are trained again.
    assert 2 <= goodput["repeated_steps"] <= 4 and goodput["repeated_s"] > 0
    seconds = [s for name, s in goodput.items() if name.endswith("_s") and name != "wall_s"]
    assert abs(sum(seconds) - goodput["wall_s"]) < 0.1
    kinds = "training start tracing restart saves evaluation".split()
    assert all(goodput[f"{kind}_s"] > 0 for kind in kinds), goodput
    # Of seconds that are rounded to milliseconds, in a job of some seconds.
    share = goodput["training_s"] / goodput["wall_s"]
    assert goodput["goodput"] == pytest.approx(share, abs=1e-3 / goodput["wall_s"] + 1e-4)


@pytest.mark.extended
@pytest.mark.processes
def test_a_worker_of_servers_that_is_started_again(tmp_path):
    flags = "--workers=2 --ps=1 --max_restarts=1".split()
    lines, (job,) = run_job(tmp_path, "kill:worker1@step=9", *flags, kind="servers")
    events = [(line["event"], line.get("task")) for line in lines]
    names = ["chief-0", "worker-0", "worker-1", "ps-0"]
    assert events[1:5] == [("task_started", name) for name in names]
    killed, restarted = (
        events.index((event, "worker-1")) for event in ("task_ended", "task_restarted")
    )
    assert lines[killed]["exit_code"] == -9 and killed < restarted
    assert lines[restarted]["restart"] == 1
    assert ("task_ended", "chief-0") in events[restarted:]
    steps = of(lines, "steps")
    assert {line["task"] for line in steps} == {"chief-0"}
    assert sum(line["steps"] for line in steps) == steps[-1]["step"] > 9
    # What steps send and read is counted when they come back.
    for way in ("bytes_sent", "bytes_received"):
        assert max(line[way] or 0 for line in steps) > 0
    assert all(line["loss"] is None or line["loss"] >= 0 for line in steps)

    assert job["is_running"] and job["pid"] == os.getpid() and job["layout"]["workers"] == 2
    assert job["command"] == [str(JOB), str(tmp_path), "servers"]
    tasks = job["tasks"]
    assert {name: task["state"] for name, task in tasks.items()} == dict.fromkeys(names, "running")
    assert tasks["worker-1"]["pid"] == lines[restarted]["pid"]
    assert [name for name, task in tasks.items() if task["steps"]] == ["chief-0"]
    said = tasks["chief-0"]["steps"]
    assert said in [{name: line[name] for name in said} for line in steps]
    text = (tmp_path / "status.txt").read_text().splitlines()
    assert text[0].startswith(f"{JOB} {tmp_path} servers: running")
    # A line above the table may name a slow task.
    heads = next(i for i, line in enumerate(text) if line.startswith("task "))
    assert [line.split()[0] for line in text[heads + 1 :]] == names


def test_what_a_killed_launcher_has_left(capsys, tmp_path):
    assert main.main(["status"]) == 0
    assert "no job of `keras-psplus run` is under way" in capsys.readouterr().out
    source = (
        "import os, pathlib, signal\n"
        "from keras_psplus.cluster.monitor.job import JobRecord\n"
        "record = JobRecord(['train.py'], {'worker': 1}, pathlib.Path('/logs'))\n"
        "record.__enter__()\n"
        "record.task_started('worker-0', os.getpid(), 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(source)
    subprocess.run([sys.executable, script], timeout=60)
    assert main.main(["status"]) == 0
    text = capsys.readouterr().out
    assert "train.py: ended: its launcher is gone" in text and " ended " in text.splitlines()[-1]
    (folder,) = job_folder.root().iterdir()
    # A process that has got the id of the killed one is another one.
    job = json.loads((folder / "job.json").read_text())
    job_folder.write_job(folder, job | {"pid": os.getpid()})
    assert main.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["is_running"] is False
    assert folder.exists()
    (job_folder.root() / "unknown").mkdir()
    # The next launcher removes what killed ones have left, also before they had written anything.
    process = subprocess.Popen(["true"])
    process.wait()
    early = job_folder.root() / f"{process.pid}-{process_identity.machine()}-x"
    elsewhere = job_folder.root() / f"{process.pid}-01234567-x"
    early.mkdir(), elsewhere.mkdir()
    ours = job_folder.make()
    assert not early.exists() and elsewhere.exists()
    # The number in the folder's name is that of the killed launcher.
    assert not folder.exists()
    job_folder.remove(ours), elsewhere.rmdir(), folder.mkdir()
    job_folder.write_job(folder, job)
    assert main.main(["status", "--clear"]) == 0
    assert os.listdir(job_folder.root()) == ["unknown"]


def test_jobs_are_this_users_alone(capsys, tmp_path):
    job_folder.root().mkdir(mode=0o777)
    job_folder.root().chmod(0o777)
    assert main.main(["status"]) == 1
    assert "is not a folder that this user alone can write to" in capsys.readouterr().err
    job_folder.root().rmdir()
    job_folder.root().symlink_to(tmp_path)
    assert main.main(["status"]) == 1
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    assert main.main(["run", "--workers=1", f"--log_dir={tmp_path}", str(script)]) == 0
    captured = capsys.readouterr()
    assert "[worker-0] trained" in captured.out
    assert "status` will not show this job" in captured.err


def test_the_state_of_a_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        birth = process_identity.birth_of(process.pid)
        assert process_identity.state_of(process.pid, birth) == "running"
        assert process_identity.state_of(process.pid, birth + 1) == "ended"
        process.communicate(b"\n")
    assert process_identity.state_of(process.pid, birth) == "ended"


@for_each("path", ["{}/missing/log.jsonl", "{}"])
@for_each("flag, what", [("json_log", "JSON log"), ("trace", "trace")])
def test_a_log_that_cannot_be_written_is_refused(path, flag, what, capsys, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)\n")
    flags = [f"--{flag}={path.format(tmp_path)}", f"--log_dir={tmp_path}"]
    assert main.main(["run", *flags, str(script)]) == 2
    error = capsys.readouterr().err
    assert f"the {what} cannot be written" in error and f"Received: --{flag}=" in error
    assert not list(tmp_path.glob("*.log"))


@for_each("flag", ["more", "--jsn"])
def test_status_takes_flags_alone(flag, capsys):
    assert main.main(["status", flag]) == 2
    assert flag.strip("-") in capsys.readouterr().err


def test_lines_of_several_processes_are_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    source = (
        "import sys\nfrom keras_psplus.cluster.monitor.job import JsonLog\n"
        "log = JsonLog(sys.argv[1])\n"
        "for i in range(300): log.append('event', task=sys.argv[2], text='x' * 3000, i=i)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(source)
    commands = [[sys.executable, script, path, str(number)] for number in range(2)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait(60) for process in processes] == [0, 0]
    for number in "01":
        assert [line["i"] for line in read(path) if line["task"] == number] == list(range(300))


def test_numbers_that_json_does_not_have(tmp_path):
    numpy = pytest.importorskip("numpy")
    log = JsonLog(tmp_path / "log.jsonl")
    log.append("steps", loss=float("nan"), logs={"mae": numpy.float32(0.5), "x": [float("inf")]})
    (line,) = read(tmp_path / "log.jsonl")
    assert line["loss"] is None and line["logs"] == {"mae": 0.5, "x": [None]}
    pandas = pytest.importorskip("pandas")
    table = pandas.read_json(tmp_path / "log.jsonl", lines=True)
    assert len(table) == 1 and table.timestamp.dt.year.min() > 2000
