"""Ways of training equal one process where replicas have no rows, or pipelines divide batches.

`tests/matrix` runs each case under the strategies in which it may go wrong.
"""

import pytest

from tests.multi_process.fit_cases import CASES, TOLERANCE, without_loss
from tests.support.cluster import equals_one_process, reference, run
from tests.support.results import assert_close
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

CELLS = [
    ("ar2", "last_batch_of_one_row"),
    *extended(
        ("ar3", "last_batch_of_one_row"),
        ("ar3", "maps_of_own_rows"),
        ("ar2x2", "last_batch_of_one_row"),
        ("pipelines4", "gradient_penalty"),
        ("pipelines4", "several_inputs_and_outputs"),
    ),
]


@pytest.mark.parametrize("layout, case", CELLS)
def test_equals_one_process(layout, case):
    equals_one_process(layout, CASES[case], TOLERANCE[case])


# Every route that a compressed gradient can take.
@pytest.mark.parametrize(
    "case",
    extended("embeddings_of_several_widths", "run_eagerly"),
)
def test_two_workers_that_compress_without_loss(case):
    found = run("ar2", without_loss, name=case)
    assert_close(found.first, reference(CASES[case]), TOLERANCE[case])
