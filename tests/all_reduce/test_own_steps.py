"""Own steps that compute with gradients leave what one process leaves."""

import pytest

from tests.all_reduce.own_steps_cases import collectives_and_bytes, refused, trained
from tests.support.cluster import equals_one_process, run
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

NAMES = [
    *("ChangedInFunction", "AppliedInLoop", *extended("RowsClipped")),
    *extended("KeptInVariables", "DerivedByHand", "RowsOfJacobian", "TakenInBranch", "WithInputs"),
    *extended("RowsVectorized", "InFunction", "ChangedAfterFunction", "LoggedAfter"),
]
OTHERWISE = [
    ("ClipByGlobalNorm", {"run_eagerly": True}),
    ("ClipByGlobalNorm", {"loss_scale": 8.0}),
    ("ClipByGlobalNorm", {"momentum": 0.0, "accumulated": 2}),
    # Whose sums come later.
    ("RowsClipped", {"updates": "accumulate:1"}),
]


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_equal_one_process(name):
    equals_one_process("ar2", trained, name=name)


@pytest.mark.extended
@pytest.mark.parametrize("name, options", OTHERWISE, ids=str)
def test_otherwise_as_well(name, options):
    equals_one_process("ar2", trained, name=name, **options)


def test_files_within_an_accumulation_have_the_sums_of_all(tmp_path):
    options = {"momentum": 0.0, "accumulated": 3, "folder": str(tmp_path)}
    results = equals_one_process("ar2", trained, name="SavedWithinAccumulation", **options)
    # A worker that asks nobody is told what its own file lacks.
    for log in results.logs.values():
        assert log.count("is saved in the middle of gradient_accumulation_steps") == 1


def test_a_norm_of_what_a_loop_returns_is_refused():
    message = str(run("ar2", refused).first["error"])
    assert "make it a loop of Python's" in message
    assert message.count("Received: ") == 1


@pytest.mark.extended
def test_gradients_that_are_handed_on_cost_no_collective():
    counts = run("devices2", collectives_and_bytes).first
    assert counts["as it is"] == counts["without stand-ins"] > 0
    # As compressed as they are otherwise.
    assert counts["bytes of Clipped"] == counts["bytes of AsItIs"] > 0
