"""What each task of a pipeline has in memory, beside one process that trains the same model."""

import re
import subprocess
import sys
import time

import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster
from tests.pipeline.memory_job import peak
from tests.pipeline.test_processes import ENVIRONMENT, JOB

SCRIPT = str(JOB.with_name("memory_job.py"))
MODEL_MB = 16 * 2500 * 2500 * 4 / 2**20
# A process that trains the whole has 2.6 GB of its own, one of four stages 1.8 to 2.3.
LIMIT_MB = 2450


def alone(*args):
    return subprocess.run(
        [sys.executable, SCRIPT, *args],
        env={**ENVIRONMENT, "PATH": "", "PYTHONPATH": python_path({})},
        capture_output=True,
        text=True,
        timeout=200,
    )


def number(what, text):
    return float(re.search(rf"^{what} (\S+)$", text, re.MULTILINE)[1])


@pytest.fixture(scope="module")
def whole():
    """What one process prints that trains the whole model."""
    done = alone()
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_worker_has_its_stage_alone_and_the_chief_none(whole, tmp_path):
    command = [
        sys.executable,
        SCRIPT,
        "--limit",
        str(LIMIT_MB),
        "--save",
        str(tmp_path / "m.keras"),
    ]
    with LocalCluster(command, workers=4, chief=True, env=ENVIRONMENT, log_dir=tmp_path) as cluster:
        peaks, log = {}, cluster.log_path("chief-0")

        def said():
            return log.read_text() if log.exists() else ""

        while "ended" not in (text := said()):
            for name, pid in cluster.pids.items():
                try:
                    now = peak(pid)
                except FileNotFoundError:
                    now = 0.0  # It has ended, like one that shows no memory.
                if not now and "ended" not in said():
                    pytest.fail(f"{name} has ended: {said()[-3000:]}")
                peaks[name] = max(now, peaks.get(name, 0.0))
            time.sleep(0.1)
        cluster.wait(timeout=60)
    # Both train the same.
    assert number("trained", text) == pytest.approx(number("trained", whole), abs=2e-4)
    # TensorFlow's libraries alone are more than a stage.
    libraries = number("imported", whole)
    added = number("ended", whole) - libraries
    print({name: round(mb) for name, mb in peaks.items()}, f"libraries {libraries}, one {added}")
    for i in range(4):
        assert peaks[f"worker-{i}"] - libraries < 0.45 * added
    # It has also saved the model, of which the optimizer has two slots for each weight.
    assert peaks["chief-0"] - libraries < 0.8 * MODEL_MB


def test_one_process_has_no_room_for_what_four_stages_train():
    done = alone("--limit", str(LIMIT_MB))
    assert done.returncode != 0 and "ended" not in done.stdout
