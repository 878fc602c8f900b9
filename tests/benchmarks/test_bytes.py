"""Bytes by the counters of links, beside what strategies count and `keras-psplus plan` computes."""

import json

import bench
import pytest

from tests.lab import netlab

# Of messages, for each of the others: what is around them, and metrics.
CONSTANT = 4096


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "name"), [(2, "powersgd"), (4, "int8")])
def test_links_carry_what_was_counted(workers, name, tmp_path, monkeypatch):
    problem = netlab.why_not()
    if problem is not None:
        pytest.skip(f"no emulated hosts here: {problem}")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    out = tmp_path / "out.json"
    argv = ["--size=small", "--works", "dense", f"--workers={workers}", "--rates", "loopback"]
    argv += ["--seconds=0.5", f"--out={out}"]
    bench.main([*argv, "--only", f"keras_psplus/all_reduce_{name}"])
    results = {r["method"]: r for r in json.loads(out.read_text())["results"]}
    result = results[f"all_reduce_{name}"]
    assert "error" not in result, result["error"]
    counted = result["counted"]
    assert counted > 10_000
    assert counted == pytest.approx(result["links"]["worker"][0], rel=0.01)
    for direction in ("sent", "received"):
        carried = result[direction]["worker"]
        assert counted <= carried <= 1.05 * counted + CONSTANT * (workers - 1), direction
