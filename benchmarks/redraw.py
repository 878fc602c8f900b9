"""Makes the drawings and the short tables of docs/ again, from the tables of results/.

    python benchmarks/redraw.py

The figures stay what they are: `benchmarks/bench.py --docs` and `benchmarks/fidelity.py` measure.
"""

import re

import fidelity
import readme_chart
from lab import manual, plots, tables
from lab.short_tables import short

FIDELITY = manual.TABLES.with_name("fidelity.md")


def pieces():
    """The short tables that the long ones give, by their names on the page."""
    return {f"short_{work}": short(manual.rows(), work) for work in ("dense", "sparse")}


def points(text):
    """Quality beside bytes, from the tables of compressors."""
    text = text.partition("\n### Tables of compressors")[2]
    text = text.partition("\n### Tables of fewer communications")[0]
    found = {}
    for title, metric, _ in fidelity.EXPERIMENTS.values():
        part = text.partition(f"## {title}\n")[2].partition("\n##")[0]
        lines = re.findall(r"^\| (?!compressor|none|---)(.+) \|$", part, re.MULTILINE)
        cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
        of_task = {c[0].strip("`"): (float(c[1].rstrip(" x")), float(c[5])) for c in cells}
        found[title, fidelity.UNITS[metric]] = of_task
    return found


def main():
    drawn = plots.draw(manual.rows(), points(FIDELITY.read_text()), manual.DOCS)
    manual.put({**pieces(), "drawings": tables.drawings(drawn)})
    readme_chart.CHART.write_text(readme_chart.svg())


if __name__ == "__main__":
    main()
