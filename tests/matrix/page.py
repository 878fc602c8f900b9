"""Writes the outcomes of `make matrix`: all cells, and docs/works.md, which sums them up.

python tests/matrix/page.py FOLDER tests/matrix/outcomes.md docs/works.md
python tests/matrix/page.py --read FOLDER tests/matrix/outcomes.md
"""

import argparse
import collections
import datetime
import json
import math
import pathlib
import re
import sys

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

# isort: split
from tests.matrix.columns import COLUMNS

FAMILIES = {
    "layers": "Layers",
    "arguments of layers": "Arguments of layers",
    "optimizers": "Optimizers",
    "arguments of optimizers": "Arguments of optimizers",
    "schedules": "Learning rate schedules",
    "losses": "Losses",
    "metrics": "Metrics",
    "initializers": "Initializers",
    "activations": "Activations",
    "regularizers": "Regularizers",
    "constraints": "Constraints",
    "random": "Random numbers",
    "callbacks": "Callbacks",
    "compile": "Arguments of `compile`",
    "fit": "Arguments of `fit`",
    "evaluate": "Arguments of `evaluate`",
    "predict": "Arguments of `predict`",
    "data": "Data",
    "programs": "Programs",
}
_TOP = """# Outcomes of the matrix

Every public name of Keras, run under every strategy and held against one process of Keras: weights,
slots, every value in the logs, `evaluate`, `predict`, and the saved file as plain Keras reads it.
`make matrix` has written this page on {date}, with {versions}.
{counts}

| in a cell | meaning |
|---|---|
| a number, such as 1e-7 | equal: the largest difference, beside the larger of the value and 1 |
| 0 | the same numbers |
| D | differs by design: the reason is below the table |
| R | refused, by a message that names the way out |
| - | not run there |

Names that share a model have the number of that model. Columns:

| column | strategy |
|---|---|
{columns}
"""
_SUMMARY = """# What of Keras works where

Every public name of Keras, and some hundred programs, trained under every strategy and compared
with one process of Keras: weights, the optimizer's state, every value in the logs, `evaluate`,
`predict`, and the saved file as plain Keras reads it. `make matrix` wrote this page on {date}, with
{versions}. {counts} `tests/matrix/outcomes.md` in the repository has the difference of each cell;
those of 1e-4 and more are of types of 16 and 8 bits.

Search this page for a name: it is either in the table of exceptions, or equal wherever it was run.

| strategy | equal | differ by design | refused | largest difference of the equal ones |
|---|---:|---:|---:|---:|
{strategies}

## Exceptions

A refusal is an error at once, which says what to do instead.

| names | under | why |
|---|---|---|
{exceptions}

## Equal everywhere

"""


def outcomes(folder):
    """Returns the outcomes in a folder."""
    files = sorted(pathlib.Path(folder).glob("*.json"))
    return [one for path in files for one in json.loads(path.read_text())]


def text(found, versions, exempt, today=None):
    """Returns the page."""
    counts = collections.Counter(one["kind"] for one in found for _ in one["names"])
    counted = ", ".join(f"{number:,} {kind}" for kind, number in counts.most_common())
    parts = [
        _TOP.format(
            date=(today or datetime.date.today()).isoformat(),
            versions=versions,
            counts=f"Of {counts.total():,} cells: {counted}.",
            columns="\n".join(f"| {one.head} | {one.strategy} |" for one in COLUMNS.values()),
        )
    ]
    for family, title in FAMILIES.items():
        cells = _cells(found, family)
        if cells or exempt.get(family):
            parts.append(_section(title, cells, _reasons(found, family), exempt.get(family, {})))
    return "\n".join(parts)


def summary(found, versions, exempt, today=None):
    """Returns the page of the manual."""
    counts = collections.Counter(one["kind"] for one in found for _ in one["names"])
    strategies, exceptions, equal, not_run = [], {}, [], {}
    for column, head in COLUMNS.items():
        here = [one for one in found if one["column"] == column for _ in one["names"]]
        kinds = collections.Counter(one["kind"] for one in here)
        worst = max((one for one in here if one["kind"] == "equal"), key=_error, default=None)
        cells = (kinds[kind] for kind in ("equal", "by design", "refused"))
        shown = " | ".join(f"{number:,}" for number in cells)
        strategies.append(f"| {head.head}: {head.strategy} | {shown} | {_mark(worst)} |")
    for family, title in FAMILIES.items():
        cells = _cells(found, family)
        for reason, (names, columns) in _reasons(found, family).items():
            before = exceptions.setdefault(reason, (set(), set()))
            before[0].update(names)
            before[1].update(columns)
        names = [
            _code(name)
            for name in sorted(cells, key=_by_letters)
            if all(one["kind"] == "equal" for one in cells[name].values())
        ]
        if names:
            is_long = family in ("programs", "arguments of layers")
            named = f"{len(names)} of them." if is_long else f"{', '.join(names)}."
            equal.append(f"**{title}.** {named}\n")
        for name, reason in exempt.get(family, {}).items():
            not_run.setdefault(reason, []).append(name)
    rows = []
    for reason, (names, columns) in exceptions.items():
        heads = ", ".join(one.head for column, one in COLUMNS.items() if column in columns)
        shown = ", ".join(_code(name) for name in sorted(names, key=_by_letters))
        rows.append(f"| {shown} | {heads} | {reason} |")
    top = _SUMMARY.format(
        date=(today or datetime.date.today()).isoformat(),
        versions=versions,
        counts=f"Of {counts.total():,} comparisons {counts['equal']:,} are equal.",
        strategies="\n".join(strategies),
        exceptions="\n".join(rows),
    )
    lines = [f"- {', '.join(f'`{one}`' for one in names)}: {why}" for why, names in not_run.items()]
    return "\n".join([top + "\n".join(equal), "## Not run", "", *lines, ""])


def _error(one):
    return one["error"]


_WORST = ("wrong", "refused", "by design", "equal")


def _cells(found, family):
    """By name and column, the worst outcome."""
    cells = collections.defaultdict(dict)
    for one in found:
        for name in one["names"]:
            # The family of a name is that of its bundle.
            if one["family"] == family:
                before = cells[name].get(one["column"], one)
                worse = _WORST.index(one["kind"]) < _WORST.index(before["kind"])
                further = one["kind"] == before["kind"] and one["error"] > before["error"]
                cells[name][one["column"]] = one if worse or further else before
    return cells


def _reasons(found, family):
    reasons = {}
    for one in found:
        if one["family"] == family and one["kind"] in ("by design", "refused"):
            reason = one["text"] + (f" ([more]({one['link']}))" if one["link"] else "")
            names = reasons.setdefault(reason, (set(), set()))
            names[0].update(one["names"])
            names[1].add(one["column"])
    return reasons


def _section(title, cells, reasons, exempt):
    lines = [f"## {title}", ""]
    if cells:
        heads = [one.head for one in COLUMNS.values()]
        lines += [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
        for name in sorted(cells, key=_by_letters):
            row = (_mark(cells[name].get(column)) for column in COLUMNS)
            lines.append(f"| {_code(name)} | {' | '.join(row)} |")
        lines.append("")
    for reason, (names, columns) in reasons.items():
        heads = [one.head for column, one in COLUMNS.items() if column in columns]
        shown = ", ".join(_code(name) for name in sorted(names, key=_by_letters))
        lines.append(f"- {shown} ({', '.join(heads)}): {reason}")
    for reason in sorted(set(exempt.values())):
        shown = ", ".join(f"`{name}`" for name in sorted(exempt) if exempt[name] == reason)
        lines.append(f"- Not run: {shown}: {reason}")
    return "\n".join([*lines, ""])


def _by_letters(name):
    return name.lower(), name


def _code(name):
    return name if " " in name else f"`{name}`"


def _mark(one):
    if one is None:
        return "-"
    if one["kind"] == "equal":
        error = one["error"]
        return (
            "0" if not error else f"{10.0 ** math.ceil(math.log10(error)):.0e}".replace("e-0", "e-")
        )
    return {"by design": "D", "refused": "R", "wrong": "WRONG"}[one["kind"]]


_ROW = re.compile(r"\| `?([^|`]+)`? \| (.+) \|")
_REASON = re.compile(r"- (.+?) \(([^()`]+)\): (.+?)(?: \(\[more\]\((\S+)\)\))?")


def read(text):
    """Returns the outcomes that a page tells, each of one name."""
    found, families = [], {f"## {title}": family for family, title in FAMILIES.items()}
    column_of = {one.head: column for column, one in COLUMNS.items()}
    family = None
    for line in text.splitlines():
        if line.startswith("## "):
            family, columns, cells = families[line], (), {}
        elif family and line.startswith("| | "):
            columns = [column_of[head] for head in line[4:-2].split(" | ")]
        elif family and (row := _ROW.fullmatch(line)):
            for column, mark in zip(columns, row[2].split(" | "), strict=True):
                if mark not in ("-", "WRONG"):
                    kind = {"D": "by design", "R": "refused"}.get(mark, "equal")
                    error = float(mark) if kind == "equal" else 0.0
                    one = {"family": family, "names": [row[1]], "column": column, "kind": kind}
                    cells[row[1], column] = {**one, "error": error, "text": "", "link": ""}
                    found.append(cells[row[1], column])
        elif family and (reason := _REASON.fullmatch(line)):
            for name in (one.strip("`") for one in reason[1].split(", ")):
                for head in reason[2].split(", ") if name != "Not run" else ():
                    one = cells.get((name, column_of.get(head)), {"kind": "equal"})
                    if one["kind"] != "equal" and not one["text"]:
                        one.update(text=reason[3], link=reason[4] or "")
    return found


def write_outcomes(folder, found):
    """Writes outcomes of a page to the folder from which `make matrix` goes on.

    Args:
        folder: The folder.
        found: Outcomes, each of one name. Bundles that lack a name's have no file.
    """
    from tests.matrix import cells, test_matrix

    known = {(one["family"], one["names"][0], one["column"]): one for one in found}
    missing = collections.Counter()
    for title, bundle in cells.BUNDLES.items():
        for column in bundle.columns:
            keys = [(bundle.family, name, column) for name in bundle.names]
            if all(key in known for key in keys):
                path = test_matrix.path_of(folder, title, column)
                path.parent.mkdir(parents=True, exist_ok=True)
                outcomes = [{"bundle": title, **known[key]} for key in keys]
                path.write_text(json.dumps(outcomes, indent=1))
            else:
                missing[column] += 1
    print(f"{missing.total()} runs are missing: {dict(missing)}")


def main(folder, page, manual):
    import keras
    import tensorflow as tf

    from tests.matrix import names

    found = outcomes(folder)
    versions = f"Keras {keras.__version__} and TensorFlow {tf.__version__}"
    page.write_text(text(found, versions, names.EXEMPT))
    manual.write_text(summary(found, versions, names.EXEMPT))
    wrong = [one for one in found if one["kind"] == "wrong"]
    for one in wrong:
        print(f"{one['column']}: {', '.join(one['names'])}: {one['error']:g} {one['text'][:300]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", action="store_true")
    parser.add_argument("folder")
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("manual", type=pathlib.Path, nargs="?")
    options = parser.parse_args()
    if options.read:
        write_outcomes(options.folder, read(options.page.read_text()))
    else:
        sys.exit(main(options.folder, options.page, options.manual))
