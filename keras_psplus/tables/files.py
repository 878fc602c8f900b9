"""Files of dynamic tables: checkpoints with keys and rows in parts.

    KEY/sizes           int64: parts of rows, parts of candidates, steps
    KEY/entries/I       keys, frequencies, last uses and times of part I
    KEY/weights/I       their rows; KEY/slots/S/I those of a slot
    KEY/candidates/I    keys that are counted
    KEY/filter          blocks of a Bloom filter

Any number of servers reads the files of any number: each takes the keys that are its own.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_psplus.files import shard_files
from keras_psplus.tables.keys import BLOCKS, blocks_of, mixed
from keras_psplus.tables.rows.chunks import ChunkedRows
from keras_psplus.tables.snapshot import KEY, living
from keras_psplus.tables.store import RowStore

_ROWS = 1 << 15
_INT, _LONG = tf.int32, tf.int64


def parts(store: RowStore, key: int) -> Iterator[dict[str, tf.Tensor]]:
    """Tensors of a table, by their names in files, a few MiB at a time.

    Args:
        store: The rows.
        key: The table's number in the files.
    """
    sizes = [0, 0, int(store.clock.steps.numpy())]
    columns: dict[str, ChunkedRows] = {"weights": store.weights}
    columns.update({f"slots/{i}": slot for i, slot in enumerate(store.slots)})
    for first, entries in _living_parts(store.entries):
        rows = tf.constant(first + np.flatnonzero(living(entries)), _INT)
        part = {f"{key}/entries/{sizes[0]}": tf.constant(entries[living(entries)], _LONG)}
        for name, column in columns.items():
            part[f"{key}/{name}/{sizes[0]}"] = column.sparse_read(rows)
        yield part
        sizes[0] += 1
    if store.admission.candidates is not None:
        for _, entries in _living_parts(store.candidates):
            name = f"{key}/candidates/{sizes[1]}"
            yield {name: tf.constant(entries[living(entries)], _LONG)}
            sizes[1] += 1
    if store.admission.filter is not None:
        yield {f"{key}/filter": store.admission.filter.read_value()}
    yield {f"{key}/sizes": tf.constant(sizes, _LONG)}


def load(
    store: RowStore,
    paths: Sequence[str],
    key: int,
    slots: int,
    server: int = 0,
    servers: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Reads a server's keys and rows from the files of any number of servers.

    Args:
        store: Its rows, which are replaced.
        paths: Paths of the files of all servers that have written, in their order.
        key: The table's number in the files.
        slots: How many of the optimizer's variables to read.
        server: Index of this server.
        servers: Number of servers now.
        progress: Function that is called after every part.
    """
    store.clear()

    def own(entries: np.ndarray) -> np.ndarray:
        owners = blocks_of(mixed(tf.constant(entries[:, KEY], _LONG))) % servers
        return np.flatnonzero(owners.numpy() == server)

    for other, path in enumerate(paths):
        rows, candidates, steps = shard_files.read_tensor(path, f"{key}/sizes", _LONG)
        store.clock.steps.assign(steps)
        for i in range(rows):
            entries = shard_files.read_tensor(path, f"{key}/entries/{i}", _LONG)
            mine = own(entries)
            store.insert(tf.constant(entries[mine]))
            for slot in range(1 + slots):
                name = f"{key}/slots/{slot - 1}/{i}" if slot else f"{key}/weights/{i}"
                values = shard_files.read_tensor(path, name, tf.float32)[mine]
                store.write(slot, tf.constant(entries[mine, KEY]), tf.constant(values))
            progress()
        if store.admission.candidates is not None:
            for i in range(candidates):
                entries = shard_files.read_tensor(path, f"{key}/candidates/{i}", _LONG)
                store.insert_candidates(tf.constant(entries[own(entries)]))
                progress()
        if store.admission.filter is not None:
            values = shard_files.read_tensor(path, f"{key}/filter", tf.uint8)
            _take_blocks(store, values, (other, len(paths)), (server, servers))


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


def _living_parts(entries: Callable[[int, int], tf.Tensor]) -> Iterator[tuple[int, np.ndarray]]:
    """Pairs of a first row and entries of some rows, of all rows."""
    first = 0
    while True:
        part = entries(first, _ROWS).numpy()
        if len(part):
            yield first, part
        first += len(part)
        if len(part) < _ROWS:
            return
