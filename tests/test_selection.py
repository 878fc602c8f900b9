import pathlib

import pytest

from tests.support.results import load

pytest_plugins = "pytester"

TESTS = """
    import pytest
    from tests.selection import cases

    @pytest.fixture(scope="module")
    def job(request):
        print("all", cases(request))
        print("first", cases(request, "test_first", "test_fixed"))
        print("second", cases(request, "test_second", argument="name", kind="b"))

    @pytest.mark.parametrize("case", ["one", "two", "three"])
    def test_first(case, job):
        pass

    @pytest.mark.cases("two", "four")
    def test_fixed(job):
        pass

    @pytest.mark.cases("three", "five", others=True)
    def test_all(job):
        pass

    @pytest.mark.parametrize("kind, name", [("a", "one"), ("b", "one"), ("b", "two")])
    def test_second(kind, name, job):
        pass
"""


@pytest.mark.parametrize(
    "option, everything, first, second",
    [
        ("", ["one", "two", "three", "four"], ["one", "two", "three", "four"], ["one", "two"]),
        ("-k=three", ["three"], ["three"], []),
        ("-k=fixed", ["two", "four"], ["two", "four"], []),
        ("-k=two", ["two"], ["two"], ["two"]),
        ("-k=all", ["three", "five"], [], []),
        ("-k=second", [], [], ["one", "two"]),
    ],
)
def test_only_the_cases_of_selected_tests(option, everything, first, second, pytester):
    pytester.makeini("[pytest]\nmarkers = cases(*names)")
    # Whose cases are none of the others'.
    pytester.makepyfile(test_one=TESTS, test_other=TESTS.replace("three", "three_others"))
    found = pytester.runpytest_inprocess("-s", *option.split())
    lines = [f"all {everything}", f"first {first}", f"second {second}"]
    found.stdout.fnmatch_lines([f"*{line}".replace("[", "[[]") for line in lines])


def test_what_is_missing_is_told_with_the_log():
    with pytest.raises(AssertionError, match="(?s)no.npz is missing:.*what went wrong"):
        load(pathlib.Path("no.npz"), "what went wrong")
