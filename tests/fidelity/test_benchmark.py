"""`benchmarks/fidelity.py` without its trainings: what it leaves out, and what it makes of them."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "fidelity.py"


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_of_fidelity", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interrupted_run_goes_on(benchmark, monkeypatch, tmp_path):
    trained = []

    def train(task, compression, seed, timeout):
        trained.append((compression, seed))
        if (compression, seed) == ("int8", 2):
            raise RuntimeError("did not end")
        return {"accuracy": 0.5, "ratio": 1.0}

    monkeypatch.setattr(benchmark, "train", train)
    path = tmp_path / "out.jsonl"
    arguments = (["digits"], ["none", "int8"], [1, 2], path, 1.0)
    results, failed = benchmark.run(*arguments)
    assert trained == [("none", 1), ("int8", 1), ("none", 2), ("int8", 2)]
    assert failed == [("digits", "int8", 2)] and len(results) == 3
    # The last line was not written to its end.
    path.write_text(path.read_text()[:-10])
    trained.clear()
    results, failed = benchmark.run(*arguments)
    assert trained == [("none", 2), ("int8", 2)]
    assert len(results) == len(benchmark.read(path)) == 3


def test_accuracy_is_compared_in_points(benchmark):
    results = [
        {"compression": name, "seed": seed, "accuracy": accuracy, "ratio": 2.0}
        for name, accuracies in {
            "none": (0.9, 0.92),
            "good": (0.897, 0.915),
            "bad": (0.9, 0.908),
            "half": (0.93,),
        }.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    table = benchmark.table(results, "accuracy", ["none", "good", "bad", "half", "missing"])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert len({len(line) for line in lines}) == 1
    none, good, bad, half = lines[2:]
    assert none[2:5] == ["91.00", "90.00 to 92.00", "2"]
    assert good[5:] == ["-0.40", "-0.30, -0.50", "yes"]
    assert bad[5:] == ["-0.60", "+0.00, -1.20", "**no**"]
    # Better is within, and a seed that is missing is not compared.
    assert half[4:] == ["1", "+3.00", "+3.00", "yes"]


def test_perplexity_is_compared_in_per_cent(benchmark):
    assert benchmark.loss_of(6.06, 6.0, "perplexity") == pytest.approx(1.0)
    assert benchmark.is_within(0.9, "perplexity") and benchmark.is_within(-5, "perplexity")
    assert not benchmark.is_within(1.1, "perplexity")
    results = [
        {"compression": name, "seed": 1, "perplexity": value, "ratio": 4.0}
        for name, value in {"none": 6.0, "sign": 6.3}.items()
    ]
    *_, line = benchmark.table(results, "perplexity", ["none", "sign"]).splitlines()
    assert "6.30" in line and "+5.00" in line and "**no**" in line
