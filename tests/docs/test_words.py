"""The manual uses the words of Keras, `tf.distribute` and the papers, and British spelling."""

import re

import pytest

from tests.docs import pages

PAGES = [*pages.PAGES, pages.ROOT / "CHANGELOG.md", pages.ROOT / "CONTRIBUTING.md"]
# What was said before, and what is said now.
PRIVATE = {
    r"rarer updates": "communicating less often",
    r"parameter servers in step": "synchronous parameter servers",
    r"(?:is|are|was|were) told\b": "named, logged, given",
    r"anew": "again, from the beginning",
    r"so many times as much": "a number",
    r"gathers? pace": "warms up",
    r"farewell": "shutdown",
    r"tally|ledger": "counter",
    r"links that lose time": "high-latency links",
    r"whoever": "anybody who, the process that",
}
# Names of Keras have its own spelling: optimizer, regularizer, initializer, synchronized.
AMERICAN = {
    r"behaviors?": "behaviour",
    r"colors?": "colour",
    r"neighbors?": "neighbour",
    r"favor\w*": "favour",
    r"centers?": "centre",
    r"(?:normal|recogn|general|parallel|organ|minim|maxim)iz\w+": "-ise",
    r"regulari[s]\w+": "regularizer, which is Keras's name",
    r"optimi[s]er\w*": "optimizer, which is Keras's name",
    r"catalogs?": "catalogue",
    r"analyz\w+": "analyse",
}


def prose(page):
    """A page's text, without code, quotes of code and addresses of links."""
    words = []
    for token in pages.tokens(page):
        for child in token.children or ():
            if child.type in ("text", "softbreak"):
                words.append(child.content if child.type == "text" else " ")
            elif child.type == "code_inline":
                words.append("`")
    return re.sub('"[^"]*"', '"', "".join(words))  # papers have titles in quotes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words(page):
    text = prose(page)
    for pattern, better in {**PRIVATE, **AMERICAN}.items():
        found = re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
        assert not found, f"{page.name}: {found[0]!r}; better: {better}"


def test_words_of_the_code():
    """Names, messages, docstrings and comments."""
    patterns = [pattern for pattern in PRIVATE if "told" not in pattern]  # "is told apart" is fine
    for file in sorted((pages.ROOT / "keras_psplus").rglob("*.py")):
        found = re.search(rf"(?:\b|_)(?:{'|'.join(patterns)})(?:\b|_)", file.read_text(), re.I)
        assert not found, f"{file.relative_to(pages.ROOT)}: {found[0]!r}"


def test_words_are_found_in_prose_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("One *color*\nis `behavior`.\n\n    told anew\n\n[center](neighbor.md)\n")
    assert prose(page) == "One color is `.center"
