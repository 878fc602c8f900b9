"""Choice of the rows of which a worker keeps copies, and their ages.

Frequencies of ids, also of those without a copy, are counted in a sketch of a fixed size, whose
counts are halved now and then (TinyLFU: Einziger et al., ACM Transactions on Storage 2017). An id
gets the place of another one that is less frequent and has no gradient to send.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_NEVER = -(1 << 62)
# Cells of the sketch, and distinct ids of steps until all counts are halved, by copies.
_CELLS, _PERIOD = 8, 64
# Places among which the least frequent ones are found, by new ids; so that time is bounded.
_LOOKED_AT, _LEAST_LOOKED_AT = 4, 1024
_FACTORS = np.array([[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F]], np.uint64)


class HotRows:
    """Places of the copies of rows, by ids; all methods take arrays.

    Time is the number of updates of the table that this replica has sent.

    Args:
        rows: Number of places.
        staleness: For how long a copy is read.

    Attributes:
        on_read: Method, for tests, that is given the time, the ids of a lookup, and for each
            whether it is read from the servers; or None.
    """

    on_read: Any = None

    def __init__(self, rows: int, staleness: int) -> None:
        self._staleness, self._room = staleness, rows
        # Sorted by ids.
        self._ids, self._places = np.zeros(0, np.int64), np.zeros(0, np.int32)
        self._id_of, self._holds = np.zeros(rows, np.int64), np.zeros(rows, bool)
        self._read_at, self._used_at = (np.full(rows, _NEVER, np.int64) for _ in range(2))
        bits = max((_CELLS * rows - 1).bit_length(), 8)
        self._counts, self._shift = np.zeros([2, 1 << bits], np.float32), np.uint64(64 - bits)
        # Ids in the sketch, and the place with which the search for one goes on.
        self._counted = self._turn = 0
        # Two lookups of a table may be at the same time.
        self._lock = threading.Lock()
        self.is_active = False

    def begin(self, ids: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, ...]:
        """Places of the copies of distinct ids that a step reads.

        Args:
            ids: int64 vector.
            now: The time.

        Returns:
            int32 places, -1 where there is none; whether the row is to be read from the servers;
            and the places that were another row's.
        """
        with self._lock:
            if not self.is_active:
                return np.full(len(ids), -1, np.int32), np.ones(len(ids), bool), _no_places()
            self._count(ids)
            places = self._find(ids)
            missing = np.flatnonzero(places < 0)
            is_read = now - self._read_at[places] > self._staleness
            is_read[missing] = True
            self._used_at[places[places >= 0]] = now
            places[missing] = self._admit(ids[missing], int(now))
            self._read_at[places[is_read & (places >= 0)]] = now
            if self.on_read is not None:
                self.on_read(int(now), ids, is_read)
            given = places[missing]
            return places, is_read, given[given >= 0]

    def put(self, ids: np.ndarray, now: np.ndarray, holds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Places of the copies of distinct ids that an update changes.

        Args:
            ids: int64 vector.
            now: The time, before the update.
            holds: Whether gradients of rows with a copy are kept.

        Returns:
            int32 places, -1 where there is none; and places and ids of the copies whose gradients
            are to be sent now, as the copies will be too old.
        """
        with self._lock:
            places = self._find(ids)
            if not self.is_active:
                # Nobody else applies this update to them.
                places[:] = -1
                self._read_at[:] = _NEVER
            if holds:
                self._holds[places[places >= 0]] = True
            return places, *self._take(self._holds & (now + 1 - self._read_at > self._staleness))

    def flush(self) -> tuple[np.ndarray, ...]:
        """Places and ids of all copies with gradients."""
        with self._lock:
            return self._take(self._holds.copy())

    def forget(self, gradients: bool) -> None:
        """Has all copies read again, and their gradients forgotten."""
        with self._lock:
            self._read_at[:] = _NEVER
            if gradients:
                self._holds[:] = False

    def _take(self, due: np.ndarray) -> tuple[np.ndarray, ...]:
        places = np.flatnonzero(due).astype(np.int32)
        self._holds[places] = False
        return places, self._id_of[places]

    def _find(self, ids: np.ndarray) -> np.ndarray:
        if not len(self._ids):
            return np.full(len(ids), -1, np.int32)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[at] == ids, self._places[at], -1).astype(np.int32)

    def _cells(self, ids: np.ndarray) -> np.ndarray:
        return (ids.astype(np.uint64) * _FACTORS) >> self._shift

    def _count(self, ids: np.ndarray) -> None:
        for counts, cells in zip(self._counts, self._cells(ids)):
            np.add.at(counts, cells, 1)
        self._counted += len(ids)
        if self._counted > _PERIOD * self._room:
            self._counts *= 0.5
            self._counted //= 2

    def _score(self, ids: np.ndarray) -> np.ndarray:
        first, second = self._cells(ids)
        return np.minimum(self._counts[0][first], self._counts[1][second])

    def _admit(self, ids: np.ndarray, now: int) -> np.ndarray:
        """Gives places to those of the ids that are frequent; returns the places, or -1."""
        given, score = np.full(len(ids), -1, np.int32), self._score(ids)
        # Of a row that was seen once, nobody knows that it will be again.
        hot = np.flatnonzero(score >= 2)
        hot = hot[np.argsort(-score[hot], kind="stable")]
        made = len(self._ids)
        free = np.arange(made, min(made + len(hot), self._room), dtype=np.int32)
        taken = _no_places()
        if len(free) < len(hot):
            others = self._next(made, max(_LOOKED_AT * len(hot), _LEAST_LOOKED_AT))
            others = others[~self._holds[others] & (self._used_at[others] < now)]
            of_others = self._score(self._id_of[others])
            count = min(len(hot) - len(free), len(others))
            if count < len(others):
                least = np.argpartition(of_others, count)[:count]
                others, of_others = others[least], of_others[least]
            order = np.argsort(of_others, kind="stable")
            candidates = score[hot[len(free) : len(free) + count]]
            taken = others[order][candidates > of_others[order]]
        places = np.concatenate([free, taken])
        hot = hot[: len(places)]
        given[hot] = places
        self._replace(taken, ids[hot], places, now)
        return given

    def _next(self, made: int, count: int) -> np.ndarray:
        """The next places in turn, at most once each."""
        places = (self._turn + np.arange(min(count, made))) % max(made, 1)
        self._turn += len(places)
        return places.astype(np.int32)

    def _replace(self, taken: np.ndarray, ids: np.ndarray, places: np.ndarray, now: int) -> None:
        if not len(places):
            return
        is_taken = np.zeros(self._room, bool)
        is_taken[taken] = True
        kept = ~is_taken[self._places]
        known, of_known = self._ids[kept], self._places[kept]
        order = np.argsort(ids)
        at = np.searchsorted(known, ids[order])
        self._ids = np.insert(known, at, ids[order])
        self._places = np.insert(of_known, at, places[order])
        self._id_of[places], self._used_at[places] = ids, now


def _no_places() -> np.ndarray:
    return np.zeros(0, np.int32)
