"""Bundles of Keras's names under every strategy.

`make test` runs some cells, so that it has each column and each family, `make test-rest` a
thirtieth of all, and `make matrix` all, which leaves each outcome in the folder MATRIX, and goes on
from those.
"""

import dataclasses
import json
import os
import pathlib

import pytest

from tests.matrix import cells
from tests.matrix.columns import COLUMNS

pytestmark = pytest.mark.processes

# By column, the bundles that `make test` runs: each family somewhere, and what takes a route of its
# own in a strategy.
# Of each strategy what has once been wrong, or is the only test of some of its lines.
TESTED = {
    "all-reduce": ("predict",),
    "two devices": ("programs: run eagerly",),
    "shard optimizer": ("optimizers: Adafactor",),
    "shard all": ("optimizers: Optimizer",),
    "tensor parallel": ("programs: tied weights", "optimizers with arguments: Muon"),
    "hybrid": (
        "optimizers: Adafactor",
        "programs: fit twice",
        "optimizers with arguments: Adam, clipped and decayed",
    ),
    "sync servers": (
        "programs: mixed precision skips overflow",
        "programs: callback that changes training",
        "programs: table for any id",
        # Of which XLA computes some.
        "arguments of layers: of volumes",
    ),
    "sync servers, cut": ("programs: masked sequence loss",),
    "async servers, cut": ("programs: callbacks between the steps",),
    "pipeline": ("programs: clipped gradients",),
}


def _marks(place, title, column):
    marks = [pytest.mark.xdist_group(column)]
    if title in TESTED.get(column, ()):
        return marks
    is_extended = (place + list(COLUMNS).index(column)) % 30 == 0
    return [*marks, pytest.mark.extended if is_extended else pytest.mark.matrix]


CELLS = [
    pytest.param(title, column, marks=_marks(place, title, column))
    for column in COLUMNS
    for place, title in enumerate(cells.BUNDLES)
    if column in cells.BUNDLES[title].columns
]


def path_of(folder, title, column):
    """Path of a cell's outcomes."""
    return pathlib.Path(folder, f"{column} - {title}.json".replace("/", "_"))


def _outcomes(title, column):
    """The outcomes of a cell: those that an earlier run has left, or new ones."""
    folder = os.environ.get("MATRIX")
    path = folder and path_of(folder, title, column)
    if path and path.exists():
        return [cells.Outcome(**one) for one in json.loads(path.read_text())]
    found = cells.outcomes(title, column)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    return found


def test_bundles_of_make_test_are_there():
    cells_of_all = {(column, title) for title, column in (cell.values for cell in CELLS)}
    assert {(column, title) for column in TESTED for title in TESTED[column]} <= cells_of_all


@pytest.mark.parametrize("title, column", CELLS)
def test_outcomes(title, column):
    wrong = [one for one in _outcomes(title, column) if one.kind == "wrong"]
    assert not wrong, "\n".join(
        f"{', '.join(one.names)}, {one.column}: {one.error:g} {one.text}" for one in wrong
    )
