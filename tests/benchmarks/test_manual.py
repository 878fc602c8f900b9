"""The manual's pages of the lab: short tables and drawings are those of the long tables."""

import importlib.util
import re
import sys

import pytest
from lab import figures, manual, tables

from tests.benchmarks.conftest import BENCHMARKS
from tests.benchmarks.test_figures import CONTENT, RESULTS


@pytest.fixture(scope="module")
def redraw():
    """The script, with the `fidelity` that it imports: `tests/fidelity` has the same name here."""
    spec = importlib.util.spec_from_file_location("fidelity", BENCHMARKS / "fidelity.py")
    fidelity = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fidelity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fidelity", fidelity)
        return importlib.import_module("redraw")


def test_figures_are_read_back_from_the_tables():
    measured = figures.rows(RESULTS)
    dense = tables.report(measured, {**CONTENT, "results": RESULTS})["dense"]
    text = f"<!-- lab: dense -->\n\n{dense}\n\n<!-- /lab: dense -->\n"
    read = manual.rows(text + text.replace("dense", "sparse"))
    assert {row.work for row in read} == {"dense", "sparse"}
    read = {(row.method, row.rate): row for row in read if row.work == "dense"}
    assert len(read) == len(measured)
    for row in measured:
        again = read[row.method, row.rate]
        assert (again.library, again.median, again.error is None) == (
            row.library,
            row.median,
            row.error is None,
        )
        if row.median:
            assert again.of_alone == pytest.approx(row.of_alone, abs=0.01)
            assert again.of_floor == pytest.approx(row.of_floor, abs=0.01)


def test_the_short_tables_of_the_page_are_those_of_the_long_ones(redraw):
    page = manual.RESULTS.read_text()
    for name, piece in redraw.pieces().items():
        assert f"<!-- lab: {name} -->\n\n{piece}\n" in page, "run benchmarks/redraw.py"


def test_drawings_show_the_tables_of_fidelity(redraw):
    points = redraw.points(redraw.FIDELITY.read_text())
    assert len(points) == 5 and all(points.values())
    (digits,) = (found for (title, _), found in points.items() if title.endswith("network, SGD"))
    assert digits["powersgd:4"] == (21.7, 0.17) and len(digits) == 9


def test_pieces_go_to_the_page_that_has_their_marks(tmp_path):
    pages = [tmp_path / "a.md", tmp_path / "b.md"]
    for page, name in zip(pages, ("short", "long")):
        page.write_text(f"<!-- lab: {name} -->\n<!-- /lab: {name} -->\n")
    manual.put({"long": "L", "short": "S"}, pages)
    assert [re.findall(r"^\w$", page.read_text(), re.MULTILINE) for page in pages] == [["S"], ["L"]]
    with pytest.raises(ValueError, match="No page has a place for 'other'"):
        manual.put({"other": "O"}, pages)
