"""Contents of a dynamic table as arrays, in the order of the keys.

Part        keys and rows of one store: of this process, another device, or a server
Contents    those of all stores that share a table's keys
Snapshot    all of a table at once
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from keras_psplus.tables.keys import owners_of

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
        """Reads what `arrays` has made."""
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
    return entries[:, FREQUENCY] >= 0


def in_chunks(read: Callable[[int, int], np.ndarray], size: int) -> np.ndarray:
    """All rows that a function of a first row and a count returns in parts."""
    parts, first = [], 0
    while True:
        part = read(first, size)
        parts.append(part)
        first += len(part)
        if len(part) < size:
            return np.concatenate(parts)


class Part(Protocol):
    """Keys and rows of one store."""

    def steps(self) -> int:
        """Number of updates."""

    def entries(self) -> np.ndarray:
        """int64 matrix, as `Snapshot.entries`, of all rows; ones without a key are among them."""

    def rows(self, slot: int, count: int) -> np.ndarray:
        """The first rows, so many, of the table, 0, or of a slot."""

    def counters(self) -> tuple[np.ndarray, np.ndarray]:
        """Entries of candidates, and blocks of a Bloom filter."""

    def clear(self, steps: int) -> None:
        """Removes all, of a table after so many updates."""

    def insert(self, entries: np.ndarray) -> None:
        """Makes rows for keys that have none."""

    def admit(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Makes rows for keys that have none, and sets frequencies that are not 0."""

    def remove(self, keys: np.ndarray) -> None:
        """Removes keys."""

    def stretch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Entries and rows from one on, so many at most."""

    def put(self, slot: int, keys: np.ndarray, rows: np.ndarray) -> None:
        """Sets rows of the table, 0, or of a slot, of keys that are there."""

    def set_counters(self, candidates: np.ndarray, blocks: np.ndarray) -> None:
        """Sets what `counters` returns, of a table that has been cleared."""


class Contents:
    """Reads and writes the stores that share a table.

    Args:
        parts: Function that returns the `Part` of each store, in order.
    """

    def __init__(self, spec: Mapping[str, Any], parts: Callable[[], Sequence[Part]]) -> None:
        self._spec, self._parts = spec, parts
        # Rows of slots that came before their keys, as files have them.
        self._waiting = WaitingRows()

    def read(self, slot: int) -> np.ndarray:
        """Rows of the table, or of a slot, in the order of their keys."""
        parts = self._parts()
        _, order, counts = _entries(parts)
        return _rows(parts, slot, order, counts)

    def snapshot(self) -> Snapshot:
        parts = self._parts()
        entries, order, counts = _entries(parts)
        counted, blocks = zip(*(part.counters() for part in parts))
        candidates, whole = np.concatenate(counted), np.concatenate(blocks)
        for i, own in enumerate(blocks):
            whole[i :: len(blocks)] = own
        return Snapshot(
            entries,
            _rows(parts, 0, order, counts),
            max(part.steps() for part in parts),
            candidates[np.argsort(candidates[:, KEY], kind="stable")],
            whole,
        )

    def items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and rows, so many at most at a time, in no order."""
        for part in self._parts():
            first, entries = 0, np.zeros([1, 4], np.int64)
            while len(entries):
                entries, rows = part.stretch(first, batch)
                first, lives = first + len(entries), living(entries)
                if lives.any():
                    yield entries[lives, KEY], rows[lives]

    def insert(self, keys: np.ndarray, columns: Sequence[tuple[int, Any]], counts: Any) -> None:
        """Sets rows, by slots, and frequencies of distinct keys."""
        parts = self._parts()
        for part, own in zip(parts, _owned(parts, keys)):
            part.admit(keys[own], counts[own])
            for slot, rows in columns:
                part.put(slot, keys[own], rows[own])

    def remove(self, keys: np.ndarray) -> None:
        parts = self._parts()
        for part, own in zip(parts, _owned(parts, keys)):
            part.remove(keys[own])

    def clear(self) -> None:
        for part in self._parts():
            part.clear(part.steps())

    def write(self, slot: int, value: Snapshot | np.ndarray) -> None:
        """Sets all of the table, or rows in the order of their keys."""
        parts = self._parts()
        steps = max(part.steps() for part in parts)
        if isinstance(value, Snapshot):
            waiting = self._waiting.take(len(value.keys), steps)
            counted = _owned(parts, value.candidates[:, KEY])
            for i, (part, own) in enumerate(zip(parts, _owned(parts, value.keys))):
                part.clear(value.steps)
                part.insert(value.entries[own])
                part.set_counters(value.candidates[counted[i]], value.filter[i :: len(parts)])
            for slot, rows in [(0, value.rows), *waiting]:
                _put(parts, slot, value.keys, rows)
            return
        keys = _entries(parts)[0][:, KEY]
        if slot:
            # A file's keys may come after its optimizer's variables.
            self._waiting.put(slot, value, steps)
            if len(value) != len(keys):
                return
        if value.shape != (len(keys), self._spec["dim"]):
            raise ValueError(
                f"The table '{self._spec['name']}' has {len(keys)} keys with rows of "
                f"{self._spec['dim']} numbers: an array must have as many, in the order of the "
                "keys. To go back to earlier keys, load a file that `save_weights` has written. "
                f"Received: an array of shape {value.shape}"
            )
        _put(parts, slot, keys, value)


def _entries(parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Entries by key; the living rows' order among all parts' rows, and counts of these."""
    every = [part.entries() for part in parts]
    together = np.concatenate(every)
    order = np.flatnonzero(living(together))
    order = order[np.argsort(together[order, KEY], kind="stable")]
    return together[order], order, [len(entries) for entries in every]


def _rows(parts: Sequence[Part], slot: int, order: np.ndarray, counts: list[int]) -> np.ndarray:
    rows = [part.rows(slot, count) for part, count in zip(parts, counts)]
    return np.concatenate(rows)[order]


def _owned(parts: Sequence[Part], keys: np.ndarray) -> list[np.ndarray]:
    """Places of each part's keys."""
    owners = owners_of(tf.constant(keys, tf.int64), len(parts)).numpy()
    return [np.flatnonzero(owners == i) for i in range(len(parts))]


def _put(parts: Sequence[Part], slot: int, keys: np.ndarray, rows: np.ndarray) -> None:
    for part, own in zip(parts, _owned(parts, keys)):
        part.put(slot, keys[own], rows[own])


# Rows of a table that have changed since an earlier look, and keys without one.


# In front of a row's numbers, as bits: its key, and its place, or -1 - place once it has expired.
HEAD = 3
# In front of the removed keys: generation, updates, time in seconds, the end of the places, and
# whether the keys are all that were removed since.
STATE = 5

# Changes are as many as half of the rows, or as many files, before all is written again.
_MOST_CHANGED, _LEAST_CHANGED, _MOST_FILES = 0.5, 1 << 10, 256

# `RowStore.removed` and `RowStore.changed` of one server, on arrays.
Server: TypeAlias = tuple[Callable[[np.ndarray], np.ndarray], Callable[..., np.ndarray]]


@dataclasses.dataclass(eq=False)
class Changes:
    """Changes of a table.

    Attributes:
        keys: int64 vector of the keys whose rows have changed, sorted.
        rows: float32 matrix of these rows.
        gone: int64 vector of keys that were removed before; some of them may be in `keys` again.
        is_whole: Whether `keys` are all that there are.
        mark: Where the next look begins.
    """

    keys: np.ndarray
    rows: np.ndarray
    gone: np.ndarray
    is_whole: bool
    mark: tuple[tuple[int, ...], ...]


def read(servers: Sequence[Server], mark: tuple[tuple[int, ...], ...] | None, dim: int) -> Changes:
    """Reads what has changed since a mark.

    Updates may go on: what one changes in the meantime comes with the next look, too.

    Args:
        mark: That of the look before; None for the whole table.
    """
    before = [(-1, 0, 0)] * len(servers) if mark is None else list(mark)
    # First of all servers, as any of them may ask for a whole.
    answers = [ask(np.array(one[:2])) for (ask, _), one in zip(servers, before)]
    now = tuple(tuple(int(v) for v in answer[:STATE]) for answer in answers)
    is_whole = not all(state[4] for state in now)
    gone = [np.zeros(0, np.int64)] + [answer[STATE:] for answer in answers]
    parts = [np.zeros([0, HEAD + dim], np.float32)]
    for (_, changed), one, state in zip(servers, before, now):
        since, first = np.array([-1, 0] if is_whole else one[1:3]), 0
        while first < state[3]:
            part = changed(since, first)
            # The last line says where to go on.
            first = int(np.ascontiguousarray(part[-1, 2:HEAD]).view(np.int32)[0])
            parts.append(part[:-1])
    lines = np.concatenate(parts)
    keys = np.ascontiguousarray(lines[:, :2]).view(np.int64)[:, 0]
    lives = np.ascontiguousarray(lines[:, 2:HEAD]).view(np.int32)[:, 0] >= 0
    gone.append(keys[~lives])
    order = np.flatnonzero(lives)
    order = order[np.argsort(keys[order], kind="stable")]
    return Changes(
        keys[order],
        np.ascontiguousarray(lines[order, HEAD:]),
        np.unique(np.concatenate(gone))[: None if not is_whole else 0],
        is_whole,
        now,
    )


def needs_whole(counts: Sequence[int]) -> bool:
    """Whether all rows are to be written again, and not only what has changed.

    Args:
        counts: Number of rows when all were written, and of each time's changes since.
    """
    if not counts or len(counts) >= _MOST_FILES:
        return True
    rows, *others = counts
    return sum(others) > max(_MOST_CHANGED * rows, _LEAST_CHANGED)


def encode(keys: tf.Tensor, places: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Lines of keys, places and rows, as `read` takes them apart; their bits pass unchanged."""
    heads = tf.bitcast(keys, tf.float32), tf.bitcast(places, tf.float32)[:, tf.newaxis]
    return tf.concat([*heads, rows], 1)
