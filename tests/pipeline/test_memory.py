"""What each task of a pipeline has in memory, beside one process that trains the same model."""

import pathlib
import re
import subprocess
import sys
import time

import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster

pytestmark = [pytest.mark.extended, pytest.mark.processes]

JOB = pathlib.Path(__file__).with_name("memory_job.py")

# A matrix goes back to the system when it is freed, and a thread's stack takes 1 MB, not 8. By
# themselves glibc's arenas keep several hundred MB, no two runs the same.
MEMORY_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
}
SMALL_STACKS = ["sh", "-c", 'ulimit -s 1024; exec "$@"', "sh"]
COMMAND = [*SMALL_STACKS, sys.executable, str(JOB)]
# Of what one process takes that trains the whole. Its runtime takes more on some machines than on
# others, and a task of a cluster has more threads: where one process takes 1.43 GB, a stage 0.98.
LIMIT = 0.82


class Peaks(dict):
    """The most that processes were seen to have in memory of their own, by name, in MB.

    Without what is mapped from files: how much of TensorFlow's libraries is in memory depends on
    what else the machine does.

    Args:
        kind: Field of the processes' status: `RssAnon`, or `VmData` for what is theirs whether it
            is in memory or not.
    """

    def __init__(self, kind="RssAnon"):
        super().__init__()
        self._kind = kind

    def read(self, pids):
        """Reads those of processes of which `pids` has the ids by name; returns the ended."""
        ended = []
        for name, pid in pids.items():
            now = 0.0
            try:
                with open(f"/proc/{pid}/status") as status:
                    now = next((int(n.split()[1]) / 1024 for n in status if self._kind in n), 0.0)
            except FileNotFoundError:
                pass
            if not now:
                ended.append(name)
            self[name] = max(now, self.get(name, 0.0))
        return ended


def alone(*args):
    """Returns how one process ended, what it printed, and its most memory, and data, in MB."""
    process = subprocess.Popen(
        [*COMMAND, *args],
        env={"PATH": "/usr/bin:/bin", **MEMORY_ENVIRONMENT, "PYTHONPATH": python_path({})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    peaks, data, end = Peaks(), Peaks("VmData"), time.monotonic() + 200
    with process:
        while process.poll() is None and time.monotonic() < end:
            peaks.read({"one": process.pid})
            data.read({"one": process.pid})
            time.sleep(0.05)
        process.kill()
        text = process.stdout.read()
    return process.returncode, text, peaks["one"], data["one"]


def number(what, text):
    return float(re.search(rf"^{what} (\S+)$", text, re.MULTILINE)[1])


def test_four_stages_train_where_one_process_has_no_room(tmp_path):
    status, whole, one, data = alone()
    assert status == 0, whole[-3000:]
    limit = ["--limit", str(int(LIMIT * data))]
    status, text, *_ = alone(*limit)
    assert status not in (0, None) and re.search("bad_alloc|MemoryError|OOM", text), text[-3000:]
    command = [*COMMAND, *limit, "--save", str(tmp_path / "m.keras")]
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
