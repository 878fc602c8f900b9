"""What each task of a pipeline has in memory, beside one process that trains the same model."""

import re
import subprocess
import sys
import time

import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster
from tests.pipeline.test_processes import ENVIRONMENT, JOB

# A matrix goes back to the system when it is freed, and a thread's stack takes 1 MB, not 8. By
# themselves glibc's arenas keep several hundred MB, no two runs the same.
MEMORY_ENVIRONMENT = {**ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
SMALL_STACKS = ["sh", "-c", 'ulimit -s 1024; exec "$@"', "sh"]
COMMAND = [*SMALL_STACKS, sys.executable, str(JOB.with_name("memory_job.py"))]
# Between what one process takes that trains the whole, 1.2 GB, and one of four stages, 0.75.
LIMIT_MB = 950


class Peaks(dict):
    """The most that processes were seen to have in memory of their own, by name, in MB.

    Without what is mapped from files: how much of TensorFlow's libraries is in memory depends on
    what else the machine does.
    """

    def read(self, pids):
        """Reads those of processes of which `pids` has the ids by name; returns the ended."""
        ended = []
        for name, pid in pids.items():
            now = 0.0
            try:
                with open(f"/proc/{pid}/status") as status:
                    now = next((int(n.split()[1]) / 1024 for n in status if "RssAnon" in n), 0.0)
            except FileNotFoundError:
                pass
            if not now:
                ended.append(name)
            self[name] = max(now, self.get(name, 0.0))
        return ended


def alone(*args):
    """Returns how one process ended, what it printed and its most memory."""
    process = subprocess.Popen(
        [*COMMAND, *args],
        env={"PATH": "/usr/bin:/bin", **MEMORY_ENVIRONMENT, "PYTHONPATH": python_path({})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    peaks, end = Peaks(), time.monotonic() + 200
    with process:
        while process.poll() is None and time.monotonic() < end:
            peaks.read({"one": process.pid})
            time.sleep(0.05)
        process.kill()
        text = process.stdout.read()
    return process.returncode, text, peaks["one"]


def number(what, text):
    return float(re.search(rf"^{what} (\S+)$", text, re.MULTILINE)[1])


def test_a_worker_has_its_stage_alone_and_the_chief_none(tmp_path):
    status, whole, one = alone()
    assert status == 0, whole[-3000:]
    command = [*COMMAND, "--limit", str(LIMIT_MB), "--save", str(tmp_path / "m.keras")]
    with LocalCluster(
        command, workers=4, chief=True, env=MEMORY_ENVIRONMENT, log_dir=tmp_path
    ) as cluster:
        peaks, log = Peaks(), cluster.log_path("chief-0")

        def said():
            return log.read_text() if log.exists() else ""

        while "ended" not in said():
            ended = peaks.read(cluster.pids)
            if ended and "ended" not in said():
                pytest.fail(f"{ended[0]} has ended: {said()[-3000:]}")
            time.sleep(0.05)
        text = said()
        cluster.wait(timeout=60)
    print({name: round(mb) for name, mb in peaks.items()}, f"one {one:.0f}")
    # Both train the same.
    assert number("trained", text) == pytest.approx(number("trained", whole), abs=2e-4)
    # A quarter of the model, and some 250 MB for the runtime of a cluster.
    for i in range(4):
        assert peaks[f"worker-{i}"] < 0.55 * one
    # It has also saved the model, of which the optimizer has two slots for each weight.
    assert peaks["chief-0"] < 0.45 * one


def test_one_process_has_no_room_for_what_four_stages_train():
    status, text, _ = alone("--limit", str(LIMIT_MB))
    assert status != 0 and "ended" not in text
