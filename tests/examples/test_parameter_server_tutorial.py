"""The tutorial on parameter servers as a user runs it: with threads, and with processes."""

import pathlib
import re
import sys

import pytest

from keras_psplus.cluster.processes import LocalCluster

pytestmark = [
    pytest.mark.extended,
    pytest.mark.processes,
    pytest.mark.usefixtures("environment"),
]
SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "parameter_server_tutorial.py"
EPOCHS, STEPS_PER_EPOCH, BATCH_SIZE = 2, 20, 32
COMMAND = [sys.executable, str(SCRIPT), "--epochs", str(EPOCHS)]
TIMEOUT = 120


def values(name, output):
    """The numbers of the line that begins with `name:`, of which there must be one."""
    (line,) = re.findall(rf"^{name}: (.*)", output, re.MULTILINE)
    return {key: float(value) for key, value in (pair.split("=") for pair in line.split())}


def check_fit(output, directory):
    result = values("fit", output)
    assert result["accuracy"] > 0.95
    assert result["workers"] == 2
    # The table is cut in two.
    (held,) = re.findall(r"bytes on each parameter server: (\d+) (\d+)$", output, re.MULTILINE)
    smaller, larger = sorted(map(int, held))
    assert smaller > 0.8 * larger, held
    left = sorted(path.name for path in directory.iterdir() if path.name != "log")
    assert left == ["checkpoint.1.keras", "checkpoint.2.keras", "model.keras"]
    assert len(list((directory / "log").rglob("*tfevents*"))) == 1


def test_in_processes_and_with_a_loop_of_its_own(tmp_path):
    command = [*COMMAND, "--own_loop"]
    with LocalCluster(command, workers=2, ps=2, chief=True, log_dir=tmp_path / "logs") as cluster:
        result = cluster.wait(timeout=TIMEOUT)
    assert result.exit_code == 0, result.tails()
    output = result.logs["chief-0"]
    check_fit(output, tmp_path / "dinner")
    result = values("own_loop", output)
    assert result["accuracy"] > 0.95
    assert result["steps"] == EPOCHS * STEPS_PER_EPOCH
    assert result["seen"] == STEPS_PER_EPOCH * BATCH_SIZE
