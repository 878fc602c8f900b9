"""Every link within the manual, README.md and CHANGELOG.md leads somewhere, also on the site.

Tables end where they should.
"""

import functools
import re

import markdown

from tests.docs import pages
from tests.support.tables import for_each

DOCS = pages.ROOT / "docs"


@functools.cache
def anchors(page):
    """Ids of a page's headings, as the site (`toc`) and as GitHub makes them."""
    converter = markdown.Markdown(extensions=["toc", "tables", "fenced_code"])
    converter.convert(page.read_text())
    levels, site = list(converter.toc_tokens), set()
    while levels:
        heading = levels.pop()
        site.add(heading["id"])
        levels += heading["children"]
    tokens = pages.tokens(page)
    texts = [
        "".join(child.content for child in tokens[number + 1].children)
        for number, token in enumerate(tokens)
        if token.type == "heading_open"
    ]
    github = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}
    return site, github


def links(page):
    """Targets of a page's links and images, without those of other sites."""
    targets = [token.attrGet("href") for token in pages.inline(page, "link_open")]
    targets += [token.attrGet("src") for token in pages.inline(page, "image")]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


@for_each(
    "page", [*pages.PAGES, *(pages.ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md"))]
)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        # The site knows nothing of the repository's other files, and no absolute paths.
        inside = DOCS if page.is_relative_to(DOCS) else pages.ROOT
        assert target.is_relative_to(inside) and not path.startswith("/"), link
        if anchor:
            site, github = anchors(target)
            assert anchor in site, (link, sorted(site))
            assert anchor in github, (link, sorted(github))


@for_each("page", pages.PAGES)
def test_an_empty_line_ends_each_table(page):
    """A line right behind a table would be a row of it."""
    lines = [*page.read_text().splitlines(), ""]
    fenced = False
    for number, (line, following) in enumerate(zip(lines, lines[1:]), 1):
        fenced ^= line.lstrip().startswith("```")
        if line.lstrip().startswith("|") and not fenced:
            end = not following.strip() or following.lstrip().startswith("|")
            assert end, f"{page.name}:{number}: a table goes on with {following!r}"


def test_there_are_links_with_and_without_anchors():
    found = [link for page in pages.PAGES for link in links(page)]
    assert any("#" in link for link in found) and any("#" not in link for link in found)


def test_the_site_has_all_pages():
    nav = (pages.ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE)
    inside = [page for page in pages.PAGES if page.is_relative_to(DOCS)]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in inside)
    # A further topic joins the page of the like, as long as that reads in about five minutes.
    assert len(inside) <= 45
    # What a page says already is said in a link to it.
    assert sum(len(page.read_text().split()) for page in inside) <= 70_000
