"""Contents of a dynamic table as arrays, in the order of the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_psplus.tables.keys import FREE

KEY, FREQUENCY, LAST, SEEN = range(4)


@dataclasses.dataclass(eq=False)
class Snapshot:
    """Keys and rows of a table.

    Attributes:
        entries: int64 matrix: each row's key, frequency, last step and its time in seconds; sorted
            by keys.
        rows: float32 matrix.
        steps: Number of updates of the table.
        candidates: Like `entries`, of keys that are counted and have no row yet.
        filter: uint8 matrix of a Bloom filter, a row for each block of keys.
    """

    entries: np.ndarray
    rows: np.ndarray
    steps: int
    candidates: np.ndarray
    filter: np.ndarray

    @property
    def keys(self) -> np.ndarray:
        """int64 vector of the keys."""
        return self.entries[:, KEY]

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it, by names, for a file."""
        return {
            "keys": self.keys,
            "rows": self.rows,
            "frequency": self.entries[:, FREQUENCY],
            "last_step": self.entries[:, LAST],
            "last_seconds": self.entries[:, SEEN],
            "steps": np.array(self.steps, np.int64),
            "candidates": self.candidates,
            "filter": self.filter,
        }

    @staticmethod
    def of_arrays(arrays: Mapping[str, Any], dim: int, name: str) -> Snapshot:
        """Reads what `arrays` has made.

        Raises:
            ValueError: If the arrays are those of another table.
        """
        names = "keys", "frequency", "last_step", "last_seconds"
        missing = [n for n in (*names, "rows", "steps", "candidates", "filter") if n not in arrays]
        rows = None if missing else np.asarray(arrays["rows"], np.float32)
        if rows is None or rows.ndim != 2 or rows.shape != (len(arrays["keys"]), dim):
            found = f"without {missing}" if rows is None else f"of shape {rows.shape}"
            raise ValueError(
                f"The file has no rows of {dim} numbers for the table '{name}': it is another "
                f"model's. Build the same model as when it was written. Received: a table {found}"
            )
        return Snapshot(
            np.stack([np.asarray(arrays[n], np.int64) for n in names], 1),
            rows,
            int(np.asarray(arrays["steps"])),
            np.asarray(arrays["candidates"], np.int64).reshape(-1, 4),
            np.asarray(arrays["filter"], np.uint8),
        )


class WaitingRows:
    """Rows of slots that a file has before the keys that they belong to.

    Nothing is trained between the one and the other.
    """

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}
        self._steps = -1

    def put(self, slot: int, rows: np.ndarray, steps: int) -> None:
        """Keeps rows of a slot, of a table after so many steps."""
        if steps != self._steps:
            self._rows, self._steps = {}, steps
        self._rows[slot] = rows

    def take(self, keys: int, steps: int) -> list[tuple[int, np.ndarray]]:
        """Slots and rows that go with a number of keys, which nobody gets again."""
        found, self._rows = self._rows if steps == self._steps else {}, {}
        return [(slot, rows) for slot, rows in found.items() if len(rows) == keys]


def living(entries: np.ndarray) -> np.ndarray:
    """Mask of the entries that have a key."""
    return entries[:, KEY] != FREE


def in_chunks(read: Callable[[int, int], np.ndarray], size: int) -> np.ndarray:
    """All rows that a function of a first row and a count returns in parts."""
    parts, first = [], 0
    while True:
        part = read(first, size)
        parts.append(part)
        first += len(part)
        if len(part) < size:
            return np.concatenate(parts)
