"""Files of dynamic tables: checkpoints with keys and rows in parts.

    KEY/sizes           int64: parts of rows, parts of candidates, updates, time in seconds, and the
                        update since which these are the changes; -1 if they are all that there is;
                        of rows and of each slot, whether they are written as bfloat16
    KEY/gone            keys that were removed before the rows were set
    KEY/entries/I       keys, frequencies, last uses and times of part I
    KEY/weights/I       their rows; KEY/slots/S/I those of a slot
    KEY/candidates/I    keys that are counted; KEY/candidates/gone those that are no more
    KEY/filter          blocks of a Bloom filter

A file of all, and files of changes that follow one another, are a chain. Any number of servers
reads the chains of any number: each takes the keys that are its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from keras_psplus.files import tables
from keras_psplus.tables.chunks import Part
from keras_psplus.tables.index import KeyRows
from keras_psplus.tables.keys import BLOCKS, owners_of
from keras_psplus.tables.snapshot import KEY
from keras_psplus.tables.store import RowStore

_ROWS = 1 << 15
_LONG = tf.int64
# Of a capture: what tells whether the next one can be of the changes since.
Mark: TypeAlias = tuple[int, int, int]
# `RowStore.freeze`, and of `FrozenRows.read` one for the rows and one for candidates.
Freeze: TypeAlias = Callable[[tf.Tensor], tuple[tf.Tensor, ...]]
Read: TypeAlias = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


class Capture:
    """Table at a moment, or its changes, written while it is trained.

    The moment is that at which this is made. `close` must be called.

    Args:
        since: `mark` of the capture whose changes since are wanted; None for all rows.
        freeze: As `store.freeze`, with nothing else going on.
        reads: As `FrozenRows.read` of rows and of candidates, with nothing else going on.

    Attributes:
        mark: For the next one.
        is_whole: Whether it is of all rows.
        changes: How many rows and keys were written.
    """

    def __init__(
        self, store: RowStore, key: int, since: Mark | None, freeze: Freeze, reads: Sequence[Read]
    ) -> None:
        self._store, self._key, self._reads = store, key, reads
        self._since = -1 if since is None else since[2]
        # No log has a generation of that number.
        state, *gone, self._filter = freeze(tf.constant(since or (-1, -1, 0), _LONG))
        numbers = [int(number) for number in state.numpy()]
        self.mark: Mark = (numbers[0], numbers[1], numbers[2])
        self._seconds, self._ends, self.is_whole = numbers[3], numbers[4:6], bool(numbers[6])
        self._gone = [np.unique(keys.numpy()) for keys in gone]
        self.changes = 0

    def warm_up(self) -> None:
        """Reads no rows, as TensorFlow makes ready what it executes for the first time."""
        for read in self._reads:
            read(tf.constant(0), tf.constant(0))

    def close(self) -> None:
        """Lets updates go on without a look at what is written."""
        for rows in _tables_of(self._store):
            rows.frozen.thaw()

    def parts(self) -> Iterator[dict[str, tf.Tensor]]:
        """Tensors, by their names in files, a few MiB at a time."""
        sizes, key = [0, 0], self._key
        for i, rows in enumerate(_tables_of(self._store)):
            for entries, values in _joined(self._read(i, rows)):
                self.changes += len(entries)
                number = sizes[i]
                sizes[i] += 1
                if i:
                    yield {f"{key}/candidates/{number}": tf.constant(entries)}
                    continue
                names = ["weights", *(f"slots/{slot}" for slot in range(len(self._store.slots)))]
                columns = np.split(values, len(names), 1)
                yield {
                    f"{key}/entries/{number}": tf.constant(entries),
                    **{
                        f"{key}/{name}/{number}": tf.cast(of, column.stored)
                        for name, of, column in zip(names, columns, self._store.columns)
                    },
                }
        others = {f"{key}/filter": self._filter} if self._store.admission.filter is not None else {}
        if not self.is_whole:
            self.changes += sum(map(len, self._gone))
            others |= _constants(dict(zip(_gone_names(key), self._gone)))
        since = -1 if self.is_whole else self._since
        in_16_bits = [column.stored == tf.bfloat16 for column in self._store.columns]
        others[f"{key}/sizes"] = tf.constant(
            [*sizes, self.mark[2], self._seconds, since, *in_16_bits], _LONG
        )
        yield others

    def _read(self, i: int, rows: KeyRows) -> Iterator[Part]:
        end = self._ends[i]
        for first in range(0, end, _ROWS):
            part = self._reads[i](tf.constant(first), tf.constant(min(first + _ROWS, end)))
            yield part[0].numpy(), part[1].numpy()
            yield from rows.frozen.take_kept()


def load(
    store: RowStore,
    chains: Sequence[Sequence[str]],
    key: int,
    slots: int,
    server: int = 0,
    servers: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Reads a server's keys and rows from the files of any number of servers.

    Args:
        store: Its rows, which are replaced.
        chains: Of each server that has written, in their order, the paths of its files, the oldest
            first.
        slots: How many of the optimizer's variables to read.
        progress: Function that is called after every part.

    Raises:
        OSError: If a file is damaged, or files do not follow one another.
    """
    store.clear()
    steps = seconds = 0

    def own(keys: np.ndarray) -> np.ndarray:
        return np.flatnonzero(owners_of(tf.constant(keys, _LONG), servers).numpy() == server)

    for other, chain in enumerate(chains):
        for path, sizes in _since_last_whole(chain, key):
            steps, seconds = max(steps, sizes[2]), max(seconds, sizes[3])
            if sizes[4] >= 0:
                for rows, name in zip(_tables_of(store), _gone_names(key)):
                    gone = tables.read_tensor(path, name, _LONG)
                    rows.remove_keys(tf.constant(gone[own(gone)]))
            for i in range(sizes[0]):
                entries = tables.read_tensor(path, f"{key}/entries/{i}", _LONG)
                mine = own(entries[:, KEY])
                keys = tf.constant(entries[mine, KEY])
                store.key_rows.remove_keys(keys)
                store.insert(tf.constant(entries[mine]))
                for slot in range(1 + slots):
                    name = f"{key}/slots/{slot - 1}/{i}" if slot else f"{key}/weights/{i}"
                    stored = tf.bfloat16 if sizes[5 + slot] else tf.float32
                    values = tables.read_tensor(path, name, stored)[mine]
                    store.write(slot, keys, tf.constant(values, tf.float32))
                progress()
            if store.admission.candidates is not None:
                for i in range(sizes[1]):
                    entries = tables.read_tensor(path, f"{key}/candidates/{i}", _LONG)
                    mine = own(entries[:, KEY])
                    store.admission.candidates.remove_keys(tf.constant(entries[mine, KEY]))
                    store.insert_candidates(tf.constant(entries[mine]))
                    progress()
        if store.admission.filter is not None:
            values = tables.read_tensor(chain[-1], f"{key}/filter", tf.uint8)
            _take_blocks(store, values, (other, len(chains)), (server, servers))
    store.clock.steps.assign(steps)
    store.clock.seconds.assign(seconds)


def _since_last_whole(chain: Sequence[str], key: int) -> list[tuple[str, list[int]]]:
    """Paths of files and their sizes, from the last one of all rows on."""
    found: list[tuple[str, list[int]]] = []
    for path in reversed(chain):
        sizes = [int(size) for size in tables.read_tensor(path, f"{key}/sizes", _LONG)]
        if found and found[0][1][4] != sizes[2]:
            raise OSError(
                f"the changes in {found[0][0]} do not follow {path}: they are those since update "
                f"{found[0][1][4]} of the table, and it was written after update {sizes[2]}"
            )
        found.insert(0, (path, sizes))
        if sizes[4] < 0:
            return found
    raise OSError(f"{chain[0]} has changes, and the file of the rows before them is missing")


def _tables_of(store: RowStore) -> list[KeyRows]:
    candidates = store.admission.candidates
    return [store.key_rows, *([] if candidates is None else [candidates])]


def _gone_names(key: int) -> tuple[str, str]:
    return f"{key}/gone", f"{key}/candidates/gone"


def _joined(parts: Iterator[Part]) -> Iterator[Part]:
    """Joins parts to some of about as many rows."""
    waiting: list[Part] = []
    for part in parts:
        if len(part[0]):
            waiting.append(part)
        if sum(len(entries) for entries, _ in waiting) >= _ROWS:
            yield _together(waiting)
            waiting = []
    if waiting:
        yield _together(waiting)


def _together(parts: Sequence[Part]) -> Part:
    entries, values = zip(*parts)
    return np.concatenate(entries), np.concatenate(values)


def _constants(arrays: dict[str, np.ndarray]) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in arrays.items()}


def _take_blocks(
    store: RowStore, values: np.ndarray, written_by: tuple[int, int], now: tuple[int, int]
) -> None:
    """Takes a server's blocks of a Bloom filter out of those of another."""
    filter_, blocks = store.admission.filter, store.admission.blocks
    assert filter_ is not None
    size = filter_.shape[0] // blocks
    theirs = np.arange(written_by[0], BLOCKS, written_by[1])
    mine = theirs % now[1] == now[0]
    if mine.any() and len(values) == len(theirs) * size:
        whole = filter_.numpy().reshape(blocks, size)
        whole[theirs[mine] // now[1]] = values.reshape(-1, size)[mine]
        filter_.assign(whole.reshape(-1))
