"""The cost model against what the lab has measured, as docs/benchmark_tables.md has it."""

import plan_truth
import pytest
from lab import manual


@pytest.fixture(scope="module")
def cells():
    return plan_truth.compare(manual.TABLES.read_text())


def test_all_of_our_rows_are_compared(cells):
    counts = {}
    for cell in cells:
        key = cell.work, cell.workers
        counts[key] = counts.get(key, 0) + 1
    assert set(counts) == {("dense", 2), ("dense", 4), ("sparse", 2), ("sparse", 4)}
    assert len(cells) > 100
    # As the page has them, by either name.
    found = {(c.work, c.workers, c.rate, c.method): c.measured for c in cells}
    assert "async_parameter_server_int8" in {method for *_, method in found}


def test_predictions_are_near_what_was_measured(cells):
    for rate in plan_truth.RATES:
        assert plan_truth.near([c for c in cells if c.rate == rate]) >= 0.8, rate
    for work in ("dense", "sparse"):
        for workers in (2, 4):
            part = [c for c in cells if (c.work, c.workers) == (work, workers)]
            assert plan_truth.near(part) >= 0.8, (work, workers)


def test_what_is_recommended_is_near_the_best_exact_one(cells):
    pairs = plan_truth.recommendations(cells)
    assert len(pairs) == 12
    for chosen, best in pairs:
        assert chosen.measured <= 1.15 * best.measured, (chosen, best)


def test_the_page_has_the_present_table(cells):
    table = plan_truth.table(cells)
    assert table in plan_truth.PAGE.read_text(), "run benchmarks/plan_truth.py --docs"
