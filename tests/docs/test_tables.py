"""Tables of the manual end where they should: a line right behind one would be a row of it."""

import pytest

from tests.docs import pages


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_an_empty_line_ends_each_table(page):
    lines = [*page.read_text().splitlines(), ""]
    fenced = False
    for number, (line, following) in enumerate(zip(lines, lines[1:]), 1):
        fenced ^= line.lstrip().startswith("```")
        if line.lstrip().startswith("|") and not fenced:
            end = not following.strip() or following.lstrip().startswith("|")
            assert end, f"{page.name}:{number}: a table goes on with {following!r}"
