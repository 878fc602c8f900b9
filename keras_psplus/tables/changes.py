"""Rows of a table that have changed since an earlier look, and keys without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

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
        servers: Functions of each.
        mark: That of the look before; None for the whole table.
        dim: Numbers in a row.
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
