"""CommunicationMonitor in real processes: all have the numbers, the chief writes them."""

import json
import pathlib

import pytest

from tests.callbacks.test_communication_monitor import scalars
from tests.support.jobs import run_in_processes

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("monitor_job.py")
NAMES = ["comm/bytes", "comm/ratio", "comm/seconds"]
STEPS = 6


def run(folder, kind, **tasks):
    run_in_processes(JOB, folder, kind, **tasks)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture(scope="module")
def all_reduce(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all_reduce")
    return folder, run(folder, "MultiWorkerMirroredStrategy", workers=2)


def check(result, ratios):
    low, high = ratios
    wire = []
    for fit in result["fits"]:
        assert set(NAMES) <= set(fit)
        wire += fit["comm/bytes"]
        assert all(low < ratio < high for ratio in fit["comm/ratio"])
        assert all(seconds >= 0 for seconds in fit["comm/seconds"])
    assert wire == pytest.approx([wire[0]] * 4)
    assert all(names == NAMES for names in result["batches"])
    return wire


@pytest.mark.extended
def test_all_workers_have_the_numbers(all_reduce):
    _, results = all_reduce
    assert sorted(results) == ["worker-0", "worker-1"]
    # A float in a byte, and a scale for each 256 of them.
    bytes_ = [check(result, (3, 4)) for result in results.values()]
    assert bytes_[0] == bytes_[1]
    first = results["worker-0"]
    # Nothing is sent between epochs, nor for validation.
    assert sum(bytes_[0]) * STEPS == pytest.approx(first["totals"]["wire"])


def test_the_chief_alone_writes(all_reduce):
    folder, _ = all_reduce
    assert list((folder / "tb-worker-0").glob("*tfevents*"))
    assert not (folder / "tb-worker-1").exists()


def test_the_chief_writes_the_longest_seconds(all_reduce):
    folder, results = all_reduce
    first, second = (
        [seconds for fit in results[name]["fits"] for seconds in fit["comm/seconds"]]
        for name in ("worker-0", "worker-1")
    )
    assert all(mine < others for mine, others in zip(first, second))
    # The last time, the chief alone had the callback.
    written = [seconds for _, seconds in scalars(folder / "tb-worker-0")["comm/seconds"]]
    alone = results["worker-0"]["alone"]["comm/seconds"]
    assert written == pytest.approx([*second, *alone])
    assert "comm/seconds" not in results["worker-1"]["alone"]


@pytest.mark.extended
def test_parameter_servers(tmp_path):
    results = run(tmp_path, "ParameterServerStrategy", workers=2, ps=1, chief=True)
    assert sorted(results) == ["chief-0"]
    # Variables are read as they are.
    check(results["chief-0"], (1.2, 2))
    assert list((tmp_path / "tb-chief-0").glob("*tfevents*"))
