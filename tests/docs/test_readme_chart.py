"""The README's chart has the figures of benchmarks/results/tables.md."""

import importlib.util

from tests.docs import pages

SPEC = importlib.util.spec_from_file_location(
    "readme_chart", pages.ROOT / "benchmarks" / "readme_chart.py"
)
readme_chart = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme_chart)


def test_the_chart_is_that_of_the_tables():
    assert readme_chart.CHART.read_text() == readme_chart.svg(), f"run {SPEC.origin}"
