"""docs/troubleshooting.md has every error and warning of the library, and none that is gone."""

import re

from tests.docs import messages, pages

PAGE = pages.ROOT / "docs" / "troubleshooting.md"
# Of a key, how many letters must stand for something.
LETTERS = 6


def keys():
    """The texts in the first column of the page's tables."""
    rows = re.findall(r"^\| (`.+?) \| .+ \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    # Texts have backquotes of their own: one ends before the comma of the next, or the column.
    return [key for row in rows for key in re.findall(r"`(.+?)`(?=, `|$)", row)]


def pattern_of(key):
    parts = [part.strip() for part in key.split("...")]
    return re.compile(".*".join(re.escape(part) for part in parts if part))


KEYS = [*map(pattern_of, keys())]


def test_every_message_is_on_the_page():
    missing = [
        f"{message.where}: {message.text}"
        for message in messages.all_messages()
        if not any(key.search(message.text) for key in KEYS)
    ]
    assert not missing, f"put into a table of {PAGE.name}:\n" + "\n".join(missing)


def test_what_is_on_the_page_is_said_by_the_library():
    lines = "\n".join(message.text for message in messages.all_literals())
    gone = [key.pattern for key in KEYS if not key.search(lines)]
    assert not gone, f"take out of {PAGE.name}: {gone}"
    assert all(len(re.findall("[a-zA-Z]", key)) >= LETTERS for key in keys())


def test_messages_are_found():
    texts = {message.text for message in messages.all_messages()}
    assert "worker-... is back" in texts  # a warning
    assert any(text.startswith("TF_CONFIG is not valid JSON: ... at line ...") for text in texts)
