"""Compares predictions of `keras-psplus plan` for the lab's work with the lab's measurements.

    python benchmarks/plan_truth.py            # prints the tables
    python benchmarks/plan_truth.py --docs     # puts them into docs/plan_accuracy.md
    python benchmarks/plan_truth.py --file bench.json

The measured milliseconds are those of the tables in docs/benchmark_tables.md, or of a file that
`bench.py` has written.
"""

import argparse
import dataclasses
import json
import pathlib

from lab import figures, ideal, manual, methods, tables, work
from lab.wire import parse_rate

from keras_psplus.planning import cost_model
from keras_psplus.planning.cost_model import Cluster

PAGE = manual.DOCS / "plan_accuracy.md"
RATES = ("100mbit", "1gbit", "loopback")
PS = 2
CORES = 2  # of the lab's machine
NEAR = 0.3


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measured figure, and what the model says of it."""

    work: str
    workers: int
    rate: str
    method: str
    exact: bool
    measured: float
    predicted: float

    @property
    def off(self):
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def measured(text):
    """Yields the work, the workers, the method, the rate and the milliseconds of our rows."""
    for row in manual.rows(text):
        if row.library == "keras_psplus":
            yield row.work, row.workers, row.method, row.rate, row.median


def compare(text):
    """All cells of dense and sparse work: a list of `Cell`.

    A step alone is what the page has for one without communication: `no_communication`, or
    `single` where that was not measured.
    """
    entries = {method.name: method.traits for method in methods.catalogue()}
    rows = list(measured(text))
    alone = {}
    for name, workers, method, rate, ms in rows:
        if method == "single" or (method, rate) == ("no_communication", "1gbit"):
            alone[name, workers] = ms  # The latter comes later.
    cells = []
    for name, workers, method, rate, ms in rows:
        traits = entries[method]
        if rate not in RATES or method in ("single", "no_communication"):
            continue
        cluster = Cluster(workers, PS, parse_rate(rate), processor=max(1, workers / CORES))
        of_work = ideal.work_of(work.SIZES["full"][name])
        predicted = cost_model.milliseconds(traits, of_work, alone[name, workers], cluster)
        exact = traits.loses == "exact"
        cells.append(Cell(name, workers, rate, method, exact, ms, predicted))
    return cells


def compare_file(path):
    """The cells of our rows in a file of the lab: a list of `Cell`."""
    content = json.loads(path.read_text())
    entries = {method.name: method.traits for method in methods.catalogue()}
    cells = []
    for row in figures.rows(content["results"]):
        if row.library != "keras_psplus" or row.path == "alone" or not (row.median and row.alone):
            continue
        traits = entries[row.method]
        cluster = Cluster(
            row.workers,
            content["settings"]["ps"],
            parse_rate(row.rate),
            processor=max(1, row.workers / CORES),
        )
        of_work = ideal.work_of(work.SIZES[content["settings"]["size"]][row.work])
        predicted = cost_model.milliseconds(traits, of_work, row.alone, cluster)
        exact = traits.loses == "exact"
        cells.append(
            Cell(row.work, row.workers, row.rate, row.method, exact, row.median, predicted)
        )
    return cells


def near(cells):
    """The part of cells whose prediction is within 30 % of what was measured."""
    return sum(abs(cell.off) <= NEAR for cell in cells) / len(cells)


def recommendations(cells):
    """For each work, number of workers and rate: the exact cells predicted and measured best."""
    groups = {}
    for cell in cells:
        if cell.exact:
            groups.setdefault((cell.work, cell.workers, cell.rate), []).append(cell)
    return [
        (min(group, key=lambda c: c.predicted), min(group, key=lambda c: c.measured))
        for group in groups.values()
    ]


def table(cells):
    """The tables for docs, as Markdown."""
    count = sum(abs(cell.off) <= NEAR for cell in cells)
    lines = [
        f"{count} of {len(cells)} predictions ({near(cells):.0%}) are within {NEAR:.0%} of what "
        "was measured.",
        "",
        "| work | workers | link | recommended | its ms | best exact one | its ms |",
        "|---|---:|---|---|---:|---|---:|",
    ]
    for chosen, best in recommendations(cells):
        lines.append(
            f"| {best.work} | {best.workers} | {best.rate} | `{chosen.method}` | "
            f"{chosen.measured:.1f} | `{best.method}` | {best.measured:.1f} |"
        )
    head = "| work | workers | entry |" + "".join(
        f" {rate}: predicted | measured | off |" for rate in RATES
    )
    lines += ["", head, "|---|---:|---|" + "---:|---:|---:|" * len(RATES)]
    found = {(c.work, c.workers, c.method, c.rate): c for c in cells}
    for name, workers, method in dict.fromkeys(key[:3] for key in found):
        line = f"| {name} | {workers} | `{method}` |"
        for rate in RATES:
            cell = found.get((name, workers, method, rate))
            line += (
                f" {cell.predicted:.1f} | {cell.measured:.1f} | {cell.off:+.0%} |"
                if cell
                else " | | |"
            )
        lines.append(line)
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write into docs/plan_accuracy.md")
    parser.add_argument("--file", type=pathlib.Path, help="that bench.py has written")
    args = parser.parse_args()
    if args.file:
        print(table(compare_file(args.file)))
        return
    text = table(compare(manual.TABLES.read_text()))
    if args.docs:
        PAGE.write_text(tables.put_in_place(PAGE.read_text(), {"truth": text}))
    else:
        print(text)


if __name__ == "__main__":
    main()
