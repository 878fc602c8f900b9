"""Writes the lab's figures into docs/ and benchmarks/results/, and reads them back."""

import pathlib
import re

from lab import tables
from lab.figures import Row, speed
from lab.methods import TITLES

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "benchmarks.md"
TABLES = DOCS.parent / "benchmarks" / "results" / "tables.md"
_LIBRARIES = {title: library for library, title in TITLES.items()}
_ALONE = ("single", "alone")


def put(pieces, pages=(RESULTS, TABLES)):
    """Puts pieces of Markdown between their marks, each into the pages that have these.

    Raises:
        ValueError: If no page has marks for a piece.
    """
    texts = {page: page.read_text() for page in pages}
    for name in pieces:
        if not any(f"<!-- lab: {name} -->" in text for text in texts.values()):
            raise ValueError(f"No page has a place for {name!r}. Received: {sorted(pieces)}")
    for page, text in texts.items():
        here = {name: piece for name, piece in pieces.items() if f"<!-- lab: {name} -->" in text}
        page.write_text(tables.put_in_place(text, here))


def rows(text=None):
    """Reads the figures of the tables of times back, without bytes.

    Args:
        text: That of the page with the tables; by default it is read.

    Returns:
        A list of `figures.Row`. Runs without communication are there once, at the fastest rate.
    """
    text = TABLES.read_text() if text is None else text
    found = []
    for work in ("dense", "sparse"):
        part = re.search(rf"<!-- lab: {work} -->(.*?)<!-- /lab: {work} -->", text, re.DOTALL)[1]
        for workers, table in re.findall(r"\*\*(\d+) workers\*\*\n\n(.*?)\n\n", part, re.DOTALL):
            head, _, *lines = (
                [c.strip() for c in row.split("|")[1:-1]] for row in table.split("\n")
            )
            columns = {c.removesuffix(": ms"): i for i, c in enumerate(head) if c.endswith(": ms")}
            for line in lines:
                found += _rows(work, int(workers), line, columns)
    return found


def _rows(work, workers, cells, columns):
    method = cells[1].strip("`")
    rates = [max(columns, key=speed)] if method in _ALONE else columns
    path = "alone" if method in _ALONE else "other"
    for rate in rates:
        ms, spread, of_alone, of_floor = cells[columns[rate] :][:4]
        key = (work, workers, _LIBRARIES[cells[0]], method, path, rate)
        if ms == "failed":
            yield Row(*key, error=ms)
        elif ms:
            low, high = map(float, spread.split(" to "))
            alone, floor = (
                float(ms) / float(ratio) if ratio else None for ratio in (of_alone, of_floor)
            )
            yield Row(*key, float(ms), low, high, alone, floor)
