"""Train steps compiled in parts: equal to one process, and gradients leave between parts."""

import pytest

from tests.all_reduce.jit_blocks_cases import PARTS, trained
from tests.support.cluster import reference, run
from tests.support.results import assert_close
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


# With 25 rows, the last batch has one row, and one replica has none.
@pytest.mark.parametrize("name, rows", [("mlp", 8), *extended(("transformer", 25), ("Own", 25))])
def test_two_workers_equal_one_process_and_sum_gradients_before_backprop_has_ended(name, rows):
    found = run("ar2", trained, name=name, rows=rows).first
    expected = reference(trained, name=name, rows=rows)
    assert_close({key: found[key] for key in expected}, expected, 2e-5)
    assert set(found["parts"]) == {PARTS}
    assert found["early"].all()
