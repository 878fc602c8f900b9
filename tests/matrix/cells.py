"""Runs a bundle of names in a column, and says what came out.

```text
bundle x column -> equal                                 all of its names are
                -> refused, or another result -> each name alone -> equal, refused, by design, wrong
```
"""

import dataclasses
import pathlib
import re
import tempfile
import time

import numpy as np

from tests.matrix import decisions, recipes, training
from tests.matrix.columns import COLUMNS
from tests.support import cluster

recipes.import_all()
BUNDLES = training.bundles()


@dataclasses.dataclass
class Outcome:
    """The result of names in a column.

    Attributes:
        names: The names.
        column: The column.
        kind: `equal`, `by design`, `refused` or `wrong`.
        error: The largest difference from one process, beside the larger of the value and 1.
        text: The message or reason, or where it differs.
        link: The page that says so.
        family: The family of the names.
        seconds: How long it took.
    """

    bundle: str
    names: list
    column: str
    kind: str
    error: float = 0.0
    text: str = ""
    link: str = ""
    family: str = ""
    seconds: float = 0.0


def outcomes(title, column):
    """Returns the outcomes of a bundle's names in a column."""
    names = BUNDLES[title].names
    whole = _outcome(title, names, column)
    if whole.kind != "wrong" or len(names) == 1:
        return [whole]
    alone = [_outcome(title, (name,), column) for name in names]
    if all(one.kind == "equal" for one in alone) and whole.kind == "wrong":
        return [dataclasses.replace(whole, text=f"only together: {whole.text}")]
    return alone


def _outcome(title, names, column):
    began, bundle = time.monotonic(), BUNDLES[title]
    kind, error, text = _result(bundle, names, column)
    link = ""
    decided = {decisions.of(title, name, column) for name in names}
    [decision] = decided if len(decided) == 1 else [None]
    if decision and (kind == decision.kind or kind == "wrong" and decision.kind == "by design"):
        # Differences by design are of finite numbers.
        kind = decision.kind if np.isfinite(error) else "wrong"
        text, link = decision.reason, decision.link
    elif kind == "refused":
        kind = "wrong"
    seconds = round(time.monotonic() - began, 1)
    return Outcome(title, list(names), column, kind, error, text, link, bundle.family, seconds)


def _result(bundle, names, column):
    """`equal`, `refused` or `wrong`, the difference, and where it is or the message."""
    arguments = {"title": bundle.title, "names": list(names)}
    expected = dict(cluster.reference(training.run, **arguments, reads=True))
    of_file = [name for name in expected if name.startswith("read/")]
    if not bundle.counts:
        expected.pop("read/slot/0", None)
        of_file = [name for name in of_file if name in expected]
    of_file = {name.partition("/")[2]: expected.pop(name) for name in of_file}
    with tempfile.TemporaryDirectory() as folder:
        file = {"file": str(pathlib.Path(folder, "model.keras"))} if of_file else {}
        try:
            results = cluster.run(
                COLUMNS[column].layout,
                training.run,
                seconds=400,
                **arguments,
                **COLUMNS[column].options,
                **file,
            )
            differences = [_difference(results.first, expected)]
            if file:
                read = cluster.run("plain", training.read, **file).first
                read = {name: read[name] for name in of_file if name in read}
                error, place = _difference(read, of_file)
                differences.append((error, f"{place} in the file"))
        except AssertionError as failure:
            kind, message = _refusal(str(failure))
            return kind, 0.0 if kind == "refused" else float("inf"), message
    error, place = max(differences)
    return "equal" if error <= bundle.tolerance else "wrong", error, place


def _difference(found, expected):
    """The largest relative difference, or infinity, and where it is."""
    if found.keys() != expected.keys():
        return float("inf"), f"names differ: {sorted(found.keys() ^ expected.keys())[:5]}"
    largest, place = 0.0, ""
    for name, value in expected.items():
        one = found[name]
        if one.shape != value.shape:
            return float("inf"), f"{name} has shape {one.shape} for {value.shape}"
        if value.dtype.kind not in "fiub":
            difference = 0.0 if np.array_equal(one, value) else float("inf")
        elif not value.size:
            difference = 0.0
        else:
            one, value = np.asarray(one, "float64"), np.asarray(value, "float64")
            same = (one == value) | (np.isnan(one) & np.isnan(value))
            apart = np.abs(np.where(same, 0.0, one - value))
            difference = np.max(apart / (1.0 + np.abs(np.where(same, 0.0, value))))
            difference = float("inf") if np.isnan(difference) else float(difference)
        if difference > largest:
            largest, place = difference, name
    return largest, place


def _refusal(failure):
    """Tells a refusal by the library, with its message, from a failure."""
    text = failure.split("--- log of", 1)[0]
    messages = re.findall(
        r"^(?:\w+\.)*\w*(?:Error|Exception): .*(?:\n(?!Traceback|---).*)*", text, re.M
    )
    last = messages[-1].strip() if messages else text.strip()[-500:]
    is_one = failure.startswith("The case failed on all tasks.") and "Received:" in last
    return ("refused" if is_one else "wrong"), last
