"""The table of faults is true of the package as it is now."""

import ast
import pathlib

import pytest

from tests.faults_on_purpose import run
from tests.faults_on_purpose.faults import FAULTS, Fault

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file(fault):
    text = (ROOT / "keras_psplus" / fault.file).read_text()
    changed = run.changed(fault, text)
    # Silent: it compiles, and is more than another layout of the same.
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert f"\n| {fault.name} | {fault.breaks} | " in (ROOT / "tests/README.md").read_text()
    assert fault.tests and all((ROOT / "tests" / path).exists() for path in fault.tests)


def test_names_differ():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("text, count", [("nothing", 0), ("a = 1\na = 1", 2)])
def test_a_text_that_is_not_there_once_is_refused(text, count):
    with pytest.raises(ValueError, match=f"Received: 'twice', whose text occurs {count} times"):
        run.changed(Fault("twice", "", "file.py", "a = 1", "a = 2", ()), text)


@pytest.mark.parametrize(
    "line, case, why",
    [
        (
            "FAILED tests/a/test_b.py::test_c[a - b] - AssertionError: no",
            "[a - b]",
            "AssertionError: no",
        ),
        ("FAILED tests/a/test_b.py::test_c", "", None),
        ("ERROR tests/a/test_b.py::test_c - OSError", "", "OSError"),
    ],
)
def test_the_first_failure_is_read_from_the_summary(line, case, why):
    found = run.FIRST_FAILURE.search(f"collected\n{line}\nFAILED tests/other.py::test")
    assert found.groups() == (f"tests/a/test_b.py::test_c{case}", why)
