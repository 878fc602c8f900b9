"""The manual's table of arguments that go together is what constructors take, and XLA as well."""

import pytest

from tests.docs import combinations
from tests.docs.compiled_case import beside
from tests.support.cluster import run
from tests.support.results import assert_close


def test_the_page_says_what_is_taken():
    text = combinations.PAGE.read_text()
    assert combinations.with_tables(text) == text, "run python -m tests.docs.combinations"


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", combinations.LAYOUTS)
def test_each_argument_goes_with_xla(name):
    first, *sharded = combinations.LAYOUTS[name]
    # "auto" is groups, or none, once links are measured.
    swapped = [
        {argument: value}
        for argument, value in combinations.taken(name)
        if argument not in ("shard", "jit_compile") and value != "auto"
    ]
    for layout, options in [(first, swapped), *((one, [{}]) for one in sharded)]:
        found = run(layout, beside, options=options, seconds=400, same=False).first
        for i, option in enumerate(options):
            compiled, plain = (
                {key[-1]: value for key, value in found.items() if key.startswith(f"{i}/{way}/")}
                for way in (True, False)
            )
            # What is rounded next to an edge may fall to the other side.
            assert_close(compiled, plain, 1e-2 if "compression" in option else 2e-5)
