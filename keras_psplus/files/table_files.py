"""Files of tables: a folder with all servers' files and a list of contents.

The list, `tables.json`, is written last, by the chief. A folder without it is incomplete, and is
ignored.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.files import digests, shard_files
from keras_psplus.files.reading import open_file

LIST, STEM = "tables.json", "tables"
_FORMAT = 1


class TableFiles:
    """Reads tables that `HybridStrategy.save_tables` has written, in any process and by parts.

    Args:
        directory: The folder, in which the files of all parameter servers must be.

    Raises:
        ValueError: If there is nothing in it, or what is there was not written to the end.

    Example:

    ```python
    files = keras_psplus.hybrid.TableFiles("tables")
    for name in files.names:
        rows, dim = files.shape(name)
        with open(f"{rows}x{dim}.f32", "wb") as file:
            for first, part in files.chunks(name):
                file.write(part.tobytes())
    # Into a model that one process has built, if the table fits into its memory.
    layer.set_weights([files.read("model/embedding/embeddings")])
    ```
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fspath(directory)
        listed = read_list(self._directory)
        if listed is None:
            raise ValueError(
                f"There are no tables in '{directory}', or they were not written to the end: "
                f"{LIST} is missing. Give a folder that `save_tables` has written, on a disk that "
                f"has the files of all parameter servers. Received: directory={directory!r}"
            )
        self._list = listed
        self._tables: dict[str, dict[str, Any]] = {t["name"]: t for t in listed["tables"]}

    @property
    def chains(self) -> list[list[str]]:
        """Paths of each server's files, without their endings, the oldest first."""
        return chains(self._directory, stems_of(self._list), self._list["servers"])

    @property
    def names(self) -> list[str]:
        """Paths of the tables' variables."""
        return list(self._tables)

    def shape(self, name: str) -> tuple[int, int]:
        """Size of a table.

        Args:
            name: The table's name; `names` has all.

        Returns:
            The number of its rows, and that of the numbers in a row.
        """
        table = self._table(name)
        return table["rows"], table["dim"]

    def slots(self, name: str) -> int:
        """Number of the optimizer's variables per table variable.

        Args:
            name: The table's name; `names` has all.

        Returns:
            Int, such as 1 for Adagrad and 2 for Adam.
        """
        return int(self._table(name)["slots"])

    def read(
        self, name: str, first: int = 0, count: int | None = None, slot: int | None = None
    ) -> np.ndarray:
        """Rows of a table.

        Args:
            name: Path of its variable, one of `names`.
            first: Number of the first row.
            count: How many rows; all that follow by default.
            slot: Number of a variable of its optimizer, from 0, to read that instead.

        Returns:
            float32 array of shape `(count, dim)`.

        Raises:
            ValueError: If there are no such rows, or no such table.
        """
        table = self._table(name)
        if not table["rows"]:
            raise ValueError(
                f"The table '{name}' is one of keys, not of numbered rows. Read it by `load_tables`"
                " into a model that has it, or save it by `model.save_weights`. "
                "Received: a DynamicEmbedding's table"
            )
        count = table["rows"] - first if count is None else count
        if not 0 <= first <= first + count <= table["rows"]:
            raise ValueError(
                f"The table '{name}' has the rows 0 to {table['rows'] - 1}. "
                f"Received: first={first}, count={count}"
            )
        if slot is not None and not 0 <= slot < table["slots"]:
            raise ValueError(
                f"The optimizer of the table '{name}' has {table['slots']} variables of its "
                f"shape. Received: slot={slot}"
            )
        rows = np.empty([count, table["dim"]], np.float32)
        servers = self._list["servers"]
        for server in range(servers):
            path = shard_files.path_of(self._directory, self._list["stem"], server, servers)
            # Those of its rows that come before `first`, and before the end.
            ends = first, first + count
            skipped, end = (shard_files.rows_of(row, server, servers) for row in ends)
            own = rows[(server - first) % servers :: servers]
            shape = shard_files.rows_of(table["rows"], server, servers), table["dim"]
            for at, size in shard_files.slices(end - skipped, table["dim"]):
                own[at : at + size] = shard_files.read(
                    path, name_of(table["key"], slot), shape, skipped + at, size
                )
        return rows

    def chunks(
        self, name: str, rows: int | None = None, slot: int | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Goes through a table, in the order of its rows.

        Args:
            name: Path of its variable, one of `names`.
            rows: Rows at once; a few MiB by default.
            slot: As for `read`.

        Yields:
            Pairs of the number of a first row and an array of the rows from there.
        """
        total, dim = self.shape(name)
        rows = rows or self._list["servers"] * shard_files.rows_in_slice(dim)
        for first in range(0, total, rows):
            yield first, self.read(name, first, min(rows, total - first), slot)

    def _table(self, name: str) -> dict[str, Any]:
        if name not in self._tables:
            raise ValueError(
                f"There is no such table in '{self._directory}', which has {self.names}. "
                f"Received: {name!r}"
            )
        return self._tables[name]


def name_of(key: int, slot: int | None = None) -> str:
    """Name of a table's variable in the files, by its number there.

    With `slot`, that of a variable of its optimizer.
    """
    return f"{key}/weights" if slot is None else f"{key}/slots/{slot}"


def stems_of(content: dict[str, Any]) -> list[str]:
    """Beginnings of the names of a list's files, the oldest first."""
    return [one["stem"] for one in content.get("chain", [content])]


def chains(directory: str, stems: Iterable[str], servers: int) -> list[list[str]]:
    """Paths of each server's files with these beginnings of names."""
    every = list(stems)
    return [
        [shard_files.path_of(directory, stem, i, servers) for stem in every] for i in range(servers)
    ]


def write_list(directory: str, content: dict[str, Any]) -> None:
    """Writes what is in a folder; from now on it counts."""
    path = os.path.join(directory, LIST)
    shard_files.write_text(path, digests.to_json({"format": _FORMAT, **content}, indent=1))


def read_list(directory: str, name: str = LIST) -> dict[str, Any] | None:
    """Contents of a folder, a dict, or None if it is incomplete.

    Raises:
        ValueError: If it is damaged, or another version of the library has written it.
    """
    path = os.path.join(directory, name)
    if not tf.io.gfile.exists(path):
        return None
    with open_file(path) as file:
        text = file.read()
    try:
        content = digests.from_json(text)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged. Put it back from a copy, or delete its folder. Received: {error}"
        ) from None
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is not of this version of the library. Received: {content.get('format')!r} "
            f"for the format {_FORMAT}"
        )
    return content
