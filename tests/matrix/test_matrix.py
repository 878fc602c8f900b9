"""Bundles of Keras's names under every strategy.

`make test` runs some cells, so that it has each column and each family, `make test-rest` a third of
all, and `make matrix` all, which leaves each outcome in the folder MATRIX, and goes on from those.
"""

import dataclasses
import json
import os
import pathlib

import pytest

from tests.matrix import cells

pytestmark = pytest.mark.processes

COLUMNS = list(cells.COLUMNS)
# Light bundles, of which `make test` runs each in one column.
TESTED = {
    "data": 1,
    "compile": 1,
}


def _marks(place, title, column):
    number = (place + COLUMNS.index(column)) % len(COLUMNS)
    marks = [pytest.mark.xdist_group(column)]
    if number in (0, 4, 8):
        return [*marks, pytest.mark.extended]
    return [*marks, pytest.mark.matrix]


CELLS = [
    pytest.param(title, column, marks=_marks(place, title, column))
    for column in COLUMNS
    for place, title in enumerate(cells.BUNDLES)
    if column in cells.BUNDLES[title].columns
]


def _outcomes(title, column):
    """The outcomes of a cell: those that an earlier run has left, or new ones."""
    folder = os.environ.get("MATRIX")
    path = folder and pathlib.Path(folder, f"{column} - {title}.json".replace("/", "_"))
    if path and path.exists():
        return [cells.Outcome(**one) for one in json.loads(path.read_text())]
    found = cells.outcomes(title, column)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    return found


@pytest.mark.parametrize("title, column", CELLS)
def test_outcomes(title, column):
    wrong = [one for one in _outcomes(title, column) if one.kind == "wrong"]
    assert not wrong, "\n".join(
        f"{', '.join(one.names)}, {one.column}: {one.error:g} {one.text}" for one in wrong
    )
