"""Workers that are added to a job, and leave it, while the launcher goes on."""

import os
import pathlib
import re
import signal
import sys
import tempfile
import threading

import pytest

from keras_psplus.cli import main
from keras_psplus.cluster.monitor.job_record import JobRecord
from keras_psplus.cluster.processes import LocalCluster
from tests.endings import wait_for_end
from tests.parameter_server.waiting import wait_for

TASK = """
import json, os, pathlib, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
child = subprocess.Popen(["sleep", "100"])
print("child", child.pid, "begins with", os.environ["KERAS_PSPLUS_MIN_WORKERS"], flush=True)
end = pathlib.Path(sys.argv[1]) / "end"
while task["type"] != "chief" or not end.exists():
    time.sleep(0.05)
"""


class Lines:
    """A console that keeps the launcher's lines in a file."""

    def __init__(self, path):
        self.path = path
        path.touch()

    def note(self, line):
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def __getattr__(self, name):
        return lambda *args: None


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Starts a job in a thread; returns its cluster, its lines, and how to wait for its end."""
    with tempfile.TemporaryDirectory(prefix="psp_") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        script = tmp_path / "task.py"
        script.write_text(TASK)
        results, threads = [], []

        def launch(min_workers, workers):
            layout = {"workers": workers, "ps": 1, "chief": True}
            record = JobRecord(["task.py"], layout, tmp_path, min_workers=min_workers)
            lines, began = Lines(tmp_path / "lines"), threading.Event()
            cluster = LocalCluster(
                [sys.executable, str(script), str(tmp_path)],
                **layout,
                env={"KERAS_PSPLUS_MIN_WORKERS": "all"},
                log_dir=tmp_path / "logs",
                console=lines,
                record=record,
                min_workers=min_workers,
                failure_grace=0.1,
                worker_grace=0.1,
                server_grace=0.1,
                kill_grace=0.2,
            )

            def run():
                with record, cluster:
                    began.set()
                    results.append(cluster.wait(60))

            threads.append(threading.Thread(target=run))
            threads[0].start()
            assert began.wait(20)

            def end():
                threads[0].join(60)
                return results[0]

            return cluster, lines.path, end

        yield launch
        (tmp_path / "end").touch()
        for thread in threads:
            thread.join(60)


def add(capsys, code=0):
    assert main.main(["add-worker", str(os.getpid())]) == code
    said = capsys.readouterr()
    return said.out + said.err


def test_workers_come_and_go(launch, tmp_path, capsys):
    cluster, lines, end = launch(1, 3)
    logs = tmp_path / "logs"
    wait_for(logs / "chief-0.log", "begins with 1")
    assert set(cluster.pids) == {"chief-0", "worker-0", "ps-0"}
    assert add(capsys).startswith("worker-1 is started")
    assert add(capsys).startswith("worker-2 is started")
    refused = add(capsys, code=1)
    assert "has all 3 workers of its range already" in refused and "Received: " in refused
    wait_for(logs / "worker-1.log", "begins with 1")
    os.kill(cluster.pids["worker-0"], signal.SIGKILL)
    wait_for(lines, "worker-0 has left (ended by signal 9), and 2 go on")
    before = cluster.pids["worker-0"]
    child = re.search(r"child (\d+)", (logs / "worker-0.log").read_text())
    assert add(capsys).startswith("worker-0 is started")
    assert cluster.pids["worker-0"] != before
    wait_for_end(int(child[1]))
    wait_for(logs / "worker-0.log", "keras-psplus: restart 1\n")
    (tmp_path / "end").touch()
    result = end()
    assert result.exit_code == 0 and result.first_failure is None
    assert set(result.log_paths) == {"chief-0", "worker-0", "worker-1", "worker-2", "ps-0"}


def test_a_job_with_too_few_workers_has_failed(launch, tmp_path):
    cluster, lines, end = launch(1, 2)
    os.kill(cluster.pids["worker-0"], signal.SIGKILL)
    result = end()
    assert (result.exit_code, result.first_failure) == (128 + signal.SIGKILL, "worker-0")
    assert "worker-1" not in result.log_paths


def test_a_job_without_a_range_takes_no_worker(launch, tmp_path, capsys):
    cluster, _, _ = launch(None, 1)
    wait_for(tmp_path / "logs" / "chief-0.log", "begins with all")
    assert "has a fixed number of workers" in add(capsys, code=2)
    assert main.main(["add-worker", "1"]) == 2
    told = capsys.readouterr().err
    assert "jobs that take workers: none. Received: 1" in told
    assert pathlib.Path(cluster.log_path("worker-0")).exists()
