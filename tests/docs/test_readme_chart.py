"""The README's chart and table have the figures of docs/benchmark_tables.md."""

import importlib.util
import re

from tests.docs import pages

SPEC = importlib.util.spec_from_file_location(
    "readme_chart", pages.ROOT / "benchmarks" / "readme_chart.py"
)
readme_chart = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme_chart)


def test_the_chart_is_that_of_the_tables():
    assert readme_chart.CHART.read_text() == readme_chart.svg(), f"run {SPEC.origin}"


def test_the_table_has_the_same_figures():
    text = (pages.ROOT / "README.md").read_text()
    table = text.partition("| milliseconds a step |")[2].partition("\n\n")[0]
    shown = re.findall(r"^\|.*?\| (?:yes|no) \| (\d+) \|", table, re.MULTILINE)
    found = readme_chart.milliseconds()
    values = [found[library, method] for library, method, _ in readme_chart.BARS]
    expected = [str(readme_chart.rounded(value)) for value in values]
    # The last row is of a run of its own, which the page says.
    assert shown[:-1] == expected
