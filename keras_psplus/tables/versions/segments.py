"""Keys and rows of versions, one on top of the other, which never change."""

from __future__ import annotations

import dataclasses

import numpy as np

# In the place of a row's number: the key has none, and no segment below counts.
_GONE, _UNKNOWN = -1, -2


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """Keys of a version, or of several that follow one another.

    Attributes:
        keys: int64 vector, sorted.
        numbers: Of each key's row, or -1 where it has none any more; None for 0, 1, 2, ...
        rows: float32 matrix.
    """

    keys: np.ndarray
    numbers: np.ndarray | None
    rows: np.ndarray

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Row numbers of keys; -1 for those that are gone, -2 for unknown ones."""
        if not len(self.keys):
            return np.full(len(keys), _UNKNOWN)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        numbers = places if self.numbers is None else self.numbers[places]
        return np.where(self.keys[places] == keys, numbers, _UNKNOWN)


def of_changes(keys: np.ndarray, rows: np.ndarray, gone: np.ndarray) -> Segment:
    """Segment of a version of changes: keys were removed, and then rows set."""
    every, first = np.unique(np.concatenate([keys, gone]), return_index=True)
    return Segment(every, np.where(first < len(keys), first, _GONE), rows)


def _merged(below: Segment, above: Segment) -> Segment:
    """Two segments as one."""
    assert below.numbers is not None and above.numbers is not None
    keys, first = np.unique(np.concatenate([above.keys, below.keys]), return_index=True)
    shifted = np.where(below.numbers >= 0, below.numbers + len(above.rows), _GONE)
    numbers = np.concatenate([above.numbers, shifted])[first]
    lives = numbers >= 0
    rows = np.concatenate([above.rows, below.rows])[numbers[lives]]
    return Segment(keys, np.where(lives, np.cumsum(lives) - 1, _GONE), rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """All of a table: a whole version, and changes on top of it.

    Attributes:
        every: Segments; the first is the whole, the others are each less than half as large as the
            one below, so that a lookup asks few of them.
    """

    every: tuple[Segment, ...]

    def with_changes(self, segment: Segment) -> Segments:
        """The same with changes on top."""
        whole, *others = self.every
        while others and len(others[-1].keys) < 2 * len(segment.keys):
            segment = _merged(others.pop(), segment)
        return Segments((whole, *others, segment))

    def lookup(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of an int64 vector of keys.

        Returns:
            float32 matrix, with zeros where there is no row, and a mask of the keys that have one.
        """
        rows = np.zeros([len(keys), self.every[0].rows.shape[1]], np.float32)
        has_row, asked = np.zeros(len(keys), bool), np.arange(len(keys))
        for segment in reversed(self.every):
            if not len(asked):
                break
            numbers = segment.find(keys[asked])
            found = numbers >= 0
            rows[asked[found]] = segment.rows[numbers[found]]
            has_row[asked[found]] = True
            asked = asked[numbers == _UNKNOWN]
        return rows, has_row

    def count(self) -> int:
        """Number of keys that have a row."""
        total, known = 0, np.zeros(0, np.int64)
        for segment in reversed(self.every):
            new = ~np.isin(segment.keys, known)
            lives = new if segment.numbers is None else new & (segment.numbers >= 0)
            total += int(lives.sum())
            known = np.union1d(known, segment.keys[new])
        return total
