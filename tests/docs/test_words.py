"""The manual uses the words of Keras, `tf.distribute` and the papers, and British spelling.

The lists are in `docs/hooks/words.py`, by which `make docs` looks for them as well.
"""

import importlib.util
import logging
import re
import types

from tests.docs import pages
from tests.support.tables import for_each

SPEC = importlib.util.spec_from_file_location("words", pages.ROOT / "docs" / "hooks" / "words.py")
words = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(words)

PAGES = [*pages.PAGES, pages.ROOT / "CHANGELOG.md", pages.ROOT / "CONTRIBUTING.md"]


def prose(page):
    """A page's text, without code and addresses of links."""
    text = []
    for token in pages.tokens(page):
        for child in token.children or ():
            if child.type in ("text", "softbreak"):
                text.append(child.content if child.type == "text" else " ")
            elif child.type == "code_inline":
                text.append("`")
    return "".join(text)


@for_each("page", PAGES)
def test_words(page):
    assert not words.misused(prose(page))


def test_words_of_the_code():
    """Names, messages, docstrings and comments."""
    # "is told apart" is fine.
    patterns = "|".join(pattern for pattern in words.PRIVATE if "told" not in pattern)
    for file in sorted((pages.ROOT / "keras_psplus").rglob("*.py")):
        found = re.search(rf"(?:\b|_)(?:{patterns})(?:\b|_)", file.read_text(), re.IGNORECASE)
        assert not found, f"{file.relative_to(pages.ROOT)}: {found[0]!r}"


def test_words_are_found_in_prose_alone(tmp_path):
    page = tmp_path / "page.md"
    text = 'One *color*\nis `behavior`.\n\n    told anew\n\n[center](neighbor.md) "favor"\n'
    page.write_text(text)
    assert [word for word, _ in words.misused(prose(page))] == ["color", "center"]


def test_the_site_is_not_built_with_them(caplog):
    """MkDocs counts warnings, and `--strict` ends with an error."""
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="page.md"))
    html = "<p>One <em>color</em> is <code>behavior</code>.</p><pre><code>anew</code></pre>"
    with caplog.at_level(logging.WARNING, "mkdocs.hooks.words"):
        assert words.on_page_content(html, page=page) == html
    (record,) = caplog.records
    assert record.getMessage() == "page.md: 'color'; better: colour"
