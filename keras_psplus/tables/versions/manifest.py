"""List of the versions in a folder.

    manifest.json         tables, and versions: a whole one, and changes that follow one another
    VERSION-TABLE-WHAT.npy    `keys` (sorted) and `rows`, and of changes `gone`

The list is renamed into place once all that it names is on the disk.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from keras_psplus.files import digests

NAME = "manifest.json"
FORMAT = 1
# Arrays of a version, with their types; a whole one has the first two.
ARRAYS = {"keys": np.int64, "rows": np.float32, "gone": np.int64}
FILE = re.compile(r"\d{8,}-\d+-(keys|rows|gone)\.npy")


def file_name(version: int, table: int, what: str) -> str:
    """Name of an array's file."""
    return f"{version:08d}-{table}-{what}.npy"


def files_of(version: dict[str, Any]) -> dict[str, str]:
    """Digests of a version's files, by their names."""
    return {name: digest for table in version["tables"] for name, digest in table["files"].items()}


def read(folder: str) -> dict[str, Any] | None:
    """Reads the list of a folder; None if there is none.

    Raises:
        ValueError: If it is damaged, or another library's, or versions do not follow one another.
    """
    path = os.path.join(folder, NAME)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        content = digests.from_json(text, must_have_digest=True)
    except ValueError as error:
        raise ValueError(
            f"The list of published tables in {path} is damaged: {error}. Publish them to an empty "
            f"folder. Received: {text[:80]!r}"
        ) from None
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a list of published tables that this version of keras_psplus reads. "
            f"Received: format={content.get('format')}"
        )
    _check_order(content["versions"], path)
    return content


def _check_order(versions: list[dict[str, Any]], path: str) -> None:
    before = None
    for version in versions:
        if version["follows"] != before:
            raise ValueError(
                f"A version in {path} does not fit the one before it: changes that others made are "
                "missing. Publish the tables to an empty folder. "
                f"Received: version {version['version']}, which follows {version['follows']}, "
                f"after {before}"
            )
        before = version["version"]
