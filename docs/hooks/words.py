"""Looks for words that the manual does not use, while MkDocs builds the site and in the tests.

The words are those of Keras, `tf.distribute` and the papers, in British spelling. A word of these
lists is warned of, and `make docs` ends with an error for that; docstrings on the page of the
reference are looked at as well.
"""

import html.parser
import logging
import re

_LOG = logging.getLogger("mkdocs.hooks.words")
# Words that only this project had, and better ones.
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
    r"the seam": "the interface between Keras and a strategy",
    r"fence of the tables": "barrier of the tables",
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
# Titles of papers, which are in quotes, have their authors' words.
_QUOTED = re.compile(r'"[^"]*"')


def misused(text):
    """The words of a text that are in the lists.

    Args:
        text: A text without code.

    Returns:
        A list of pairs: what was found, and what is better.
    """
    text = _QUOTED.sub('"', text)
    found = []
    for pattern, better in {**PRIVATE, **AMERICAN}.items():
        match = re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
        if match:
            found.append((match[0], better))
    return found


def on_page_content(content, page, **kwargs):
    """Warns of words on a page.

    Args:
        content: The page's HTML.
        page: The page.
        kwargs: Not used.

    Returns:
        The HTML as it is.
    """
    for word, better in misused(prose(content)):
        _LOG.warning("%s: %r; better: %s", page.file.src_uri, word, better)
    return content


def prose(content):
    """The text of a page's HTML, without code and drawings."""
    reader = _Prose()
    reader.feed(content)
    return "".join(reader.text)


class _Prose(html.parser.HTMLParser):
    _CODE = ("code", "pre", "svg")

    def __init__(self):
        super().__init__()
        self.text, self._within = [], 0

    def handle_starttag(self, tag, attrs):
        self._within += tag in self._CODE

    def handle_endtag(self, tag):
        if tag in self._CODE:
            self._within -= 1
            self.text.append("`")

    def handle_data(self, data):
        if not self._within:
            self.text.append(data)
