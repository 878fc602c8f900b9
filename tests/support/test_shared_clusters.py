import pathlib

from tests.matrix.columns import COLUMNS
from tests.support.layouts import LAYOUTS
from tests.support.shared_clusters import SHARED, place_of

TESTS = pathlib.Path(__file__).parents[1]


def test_rows_are_of_what_there_is():
    assert set(SHARED) <= set(LAYOUTS)
    named = [what for row in SHARED.values() for what in row]
    assert len(named) == len(set(named))
    assert not [one for one in named if one not in COLUMNS and not (TESTS / one).is_file()]


def test_columns_go_with_the_files_of_their_cluster():
    cell = "tests/matrix/test_matrix.py::test_outcomes[optimizers: Adam, clipped-{}]"
    assert {place_of(cell.format(one))[0] for one in ("hybrid", "pipeline")} == {
        *("hybrid22", "pipeline2")
    }
    assert place_of(cell.format("XLA"))[0] is None
    file = "tests/multi_process/test_data.py::test_one[a-b]"
    assert place_of(file)[0] == "ar2" and place_of("tests/test_log.py::test_one")[0] is None
