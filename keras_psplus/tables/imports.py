"""Rows that other systems have written, into a `layers.DynamicEmbedding`.

TFRA writes a `de.Variable` by shards, and each slot of an optimizer as a variable of its own:

    .../tables_of_NAME/SHARD/.ATTRIBUTES/table-keys, table-values    in a checkpoint of TensorFlow's
    NAME_mht_PARTofPARTS-keys, -values                               in one of TensorFlow 1
    NAME_mht_PARTofPARTS_rankR_sizeS-keys, -values                   files of `FileSystemSaver`

A slot's name begins with that of its table, and ends with its own, as `.../m`; so does that of the
frequencies that a `FrequencyRestrictPolicy` counts.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import shown, whole_number
from keras_psplus.tables.row_variable import is_keyed

Path: TypeAlias = str | os.PathLike[str]
# Keys, rows, slots and counts, as `DynamicEmbedding.insert` takes them.
Part: TypeAlias = tuple[Any, Any, Sequence[Any] | None, Any]

_BATCH = 1 << 16
_IN_CHECKPOINT = re.compile(r"(?:.*/)?tables_of_(?P<name>[^/]+)/(?P<part>\d+)/\.ATTRIBUTES/table-")
_IN_FILES = re.compile(
    r"(?P<name>.+)_mht_(?P<part>\d+)of(?P<parts>\d+)(?:_rank(?P<rank>\d+)_size(?P<size>\d+))?-"
)
# Keras 3's names of slots, by those of Keras 2.
_SLOTS = {
    "m": "momentum",
    "v": "velocity",
    "vhat": "velocity_hat",
    "rms": "velocity",
    "mg": "average_gradient",
    "accum_grad": "accumulated_grad",
    "accum_var": "accumulated_delta_var",
    **{name: name for name in ("accumulator", "linear", "momentum", "velocity", "velocity_hat")},
    "average_gradient": "average_gradient",
}
_FREQUENCY = "frequency"
_KINDS = *_SLOTS, _FREQUENCY, "timestamp"


def import_tfra(
    layer: Any, path: Path, table: str | None = None, *, slots: bool = True, batch: int = _BATCH
) -> int:
    """Inserts a table that TensorFlow Recommenders Addons has written.

    A checkpoint is read by TensorFlow alone, a shard at a time; files of a `FileSystemSaver` are
    mapped into memory. Frequencies that a `FrequencyRestrictPolicy` has counted become `counts`.
    Of a job's workers, all call it, as `layer.insert`, with files that all can read.

    Args:
        layer: A built `layers.DynamicEmbedding` of the same width.
        path: Prefix of a checkpoint, such as `"folder/ckpt-1"`; the folder of checkpoints, of which
            the last one counts; that of a SavedModel, or of files of a `FileSystemSaver`.
        table: Name of the `de.Variable`, such as `"user_embedding-parameter"`, where there are
            several.
        slots: Whether to insert the slots that are there, for the same optimizer.
        batch: Rows at a time.

    Returns:
        Number of keys.

    Raises:
        FileNotFoundError: If there is nothing of TFRA at the path.
        OSError: If a file is damaged.
        ValueError: If the table, its rows or slots do not fit the layer.

    Example:

    ```python
    keras_psplus.tables.import_tfra(layer, "tfra/ckpt-1", "user_embedding-parameter")
    ```
    """
    source = _open(os.fspath(path))
    owners = source.owners()
    tables = [name for name, owner in owners.items() if owner is None]
    name = tables[0] if table is None and len(tables) == 1 else table
    if name not in tables:
        raise ValueError(
            f"{source.path} has the tables of TFRA's {', '.join(map(repr, sorted(tables)))}: say "
            f"which one by `table=`. Received: table={shown(table)}"
        )
    extras = {owner[1]: one for one, owner in owners.items() if owner and owner[0] == name}
    order = _order(layer, source, name, set(extras) & set(_SLOTS)) if slots else []
    names = [extras[slot] for slot in order]
    return _insert(layer, source.read(layer, name, names, extras.get(_FREQUENCY)), batch)


def import_npy(
    layer: Any, keys: Path, rows: Path, slots: Sequence[Path] = (), batch: int = _BATCH
) -> int:
    """Inserts keys and rows of NumPy's files, which are mapped into memory.

    Args:
        layer: A built `layers.DynamicEmbedding`.
        keys: Path of a `.npy` file with a vector of integers or strings.
        rows: Path of one with a row for each key.
        slots: Paths of others like `rows`, as `layer.insert` takes slots.
        batch: Rows at a time.

    Returns:
        Number of keys.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the arrays do not fit each other, or the layer.
    """
    vector, *matrices = (_mapped(os.fspath(path)) for path in (keys, rows, *slots))
    for path, matrix in zip((rows, *slots), matrices):
        _check(layer, f"The array of {os.fspath(path)}", vector, matrix, layer.dim)
    return _insert(layer, [(vector, matrices[0], matrices[1:] or None, None)], batch)


def import_parquet(
    layer: Any, path: Path, key: str = "key", row: str = "row", batch: int = _BATCH
) -> int:
    """Inserts keys and rows of a Parquet file, by pyarrow.

    Args:
        layer: A built `layers.DynamicEmbedding`.
        path: Path of the file.
        key: Name of the column of integers or strings.
        row: Name of the column of lists of numbers.
        batch: Rows at a time.

    Returns:
        Number of keys.

    Raises:
        ImportError: If pyarrow is not installed.
        OSError: If the file cannot be read.
        ValueError: If it has no such columns, or they do not fit the layer.
    """
    name = os.fspath(path)
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            "pyarrow, which reads Parquet files, is not installed: `pip install pyarrow`, or write "
            f"keys and rows as .npy files for `import_npy`. Received: path={name!r}"
        ) from error
    try:
        file = parquet.ParquetFile(name)
    except (OSError, ValueError) as error:
        raise OSError(f"Cannot read {name} as Parquet. Received: {error}") from error
    columns = file.schema_arrow.names
    if not {key, row} <= set(columns):
        raise ValueError(
            f"{name} has the columns {', '.join(columns)}: say which ones by `key=` and `row=`. "
            f"Received: key={shown(key)}, row={shown(row)}"
        )

    def parts() -> Iterator[Part]:
        for part in file.iter_batches(whole_number("batch", batch, 1), columns=[key, row]):
            # Lists may be of different lengths, which only `insert` would not tell by the file.
            flat = part.column(row).flatten().to_numpy(zero_copy_only=False)
            keys = part.column(key).to_numpy(zero_copy_only=False)
            is_whole = flat.size == len(keys) * layer.dim
            rows = flat.reshape(len(keys), layer.dim) if is_whole else flat
            _check(layer, f"The column '{row}' of {name}", keys, rows, layer.dim)
            yield keys, rows, None, None

    return _insert(layer, parts(), batch)


def _insert(layer: Any, parts: Iterable[Part], batch: int) -> int:
    """Inserts parts of any size, so many rows at a time."""
    step, total = whole_number("batch", batch, 1), 0
    for keys, rows, slots, counts in parts:
        for first in range(0, len(keys), step):
            part = slice(first, first + step)
            own = None if slots is None else [one[part] for one in slots]
            layer.insert(keys[part], rows[part], own, None if counts is None else counts[part])
        total += len(keys)
    return total


def _check(layer: Any, what: str, keys: np.ndarray, rows: np.ndarray, width: int) -> None:
    if keys.ndim != 1 or rows.shape != (len(keys), width):
        raise ValueError(
            f"{what} does not fit the table of '{layer.name}': for each key, it needs {width} "
            f"numbers. Received: keys of shape {keys.shape}, values of shape {rows.shape}"
        )


def _mapped(path: str) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise OSError(f"Cannot read {path} as an array of NumPy's. Received: {error}") from error
    return array


# Files of TFRA.


class _Source:
    """Tables of a checkpoint or a folder.

    Attributes:
        path: Of all.
        shards: By names of tables and by shard, how the names of its keys and values begin.
        separator: What is between the parts of tables' names.
    """

    def __init__(self, path: str, names: Sequence[str]) -> None:
        self.path, self.separator = path, "_"
        self.shards: dict[str, dict[tuple[int, ...], str]] = {}
        counts: dict[str, int] = {}
        for one in names:
            base = one.removesuffix("keys")
            if base != one and (found := _IN_CHECKPOINT.fullmatch(base)):
                # As TensorFlow writes slashes.
                name = re.sub(r"\.(.)", lambda of: "/" if of[1] == "S" else of[1], found["name"])
                self.separator = "/"
                self.shards.setdefault(name, {})[int(found["part"]),] = base
            elif base != one and (found := _IN_FILES.fullmatch(base)):
                size, rank = int(found["size"] or 1), int(found["rank"] or 0)
                shards = self.shards.setdefault(found["name"], {})
                shards[size, rank, int(found["part"])] = base
                counts[found["name"]] = size * int(found["parts"])
        for name, count in counts.items():
            if len(self.shards[name]) != count:
                raise ValueError(
                    f"{path} has not the {count} shards of the table '{name}', or those of another "
                    f"job beside them. Received: {', '.join(self.shards[name].values())}"
                )

    def owners(self) -> dict[str, tuple[str, str] | None]:
        """Tables by the names of their slots, and the slots' own; None for a table."""
        found: dict[str, tuple[str, str] | None] = {}
        for name in self.shards:
            kinds = [kind for kind in _KINDS if name.endswith(f"{self.separator}{kind}")]
            tables = [one for one in self.shards if name.startswith(f"{one}{self.separator}")]
            is_own = kinds and tables
            found[name] = (max(tables, key=len), max(kinds, key=len)) if is_own else None
        return found

    def array(self, name: str, dtype: Any, width: int) -> np.ndarray:
        """Array of a name; files do not say their type and width."""
        raise NotImplementedError

    def read(
        self, layer: Any, name: str, slots: Sequence[str], frequency: str | None
    ) -> Iterator[Part]:
        """Keys, rows, slots and counts of a table, by shards."""
        for shard, base in sorted(self.shards[name].items()):
            keys, rows = self._pair(layer, base, layer.dim)
            known, columns = np.ones(len(keys), bool), []
            for slot in slots:
                places, found = _places(keys, self._shard(slot, shard, layer, layer.dim))
                known &= found
                columns.append(places)
            counts = None
            if frequency is not None:
                times, found = _places(keys, self._shard(frequency, shard, layer, 1, np.int32))
                counts = np.where(found, np.maximum(times[:, 0].astype(np.int64), 1), 1)
            yield from _split(keys, rows, columns, counts, known)

    def _shard(
        self, name: str, shard: tuple[int, ...], layer: Any, width: int, dtype: Any = np.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        base = self.shards[name].get(shard)
        if base is None:
            raise ValueError(
                f"{self.path} has other shards of '{name}' than of its table: it is not whole, or "
                f"`slots=False` goes without. Received: {', '.join(self.shards[name].values())}"
            )
        return self._pair(layer, base, width, dtype)

    def _pair(
        self, layer: Any, base: str, width: int, dtype: Any = np.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        keys = self.array(f"{base}keys", np.int64, 0)
        values = self.array(f"{base}values", dtype, width)
        _check(layer, f"'{base}values' of {self.path}", keys, values, width)
        return keys, values


class _Checkpoint(_Source):
    def __init__(self, path: str, reader: Any) -> None:
        self._reader = reader
        super().__init__(path, sorted(reader.get_variable_to_shape_map()))

    def array(self, name: str, dtype: Any, width: int) -> np.ndarray:
        try:
            array: np.ndarray = self._reader.get_tensor(name)
        except (tf.errors.OpError, RuntimeError, ValueError, IndexError) as error:
            raise OSError(
                f"Cannot read the tensor '{name}' of {self.path}: it is not whole. "
                f"Received: {error}"
            ) from error
        return array


class _Folder(_Source):
    def __init__(self, path: str) -> None:
        super().__init__(path, sorted(os.listdir(path)))

    def array(self, name: str, dtype: Any, width: int) -> np.ndarray:
        path = os.path.join(self.path, name)
        try:
            size = os.path.getsize(path)
            array = np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
        except (OSError, ValueError) as error:
            raise OSError(f"Cannot read {path}: it is not whole. Received: {error}") from error
        is_whole = width > 0 and array.size % width == 0
        return array.reshape(-1, width) if is_whole else array


def _open(path: str) -> _Source:
    prefixes, folders = [path], [path]
    if os.path.isdir(path):
        saved_model = os.path.join(path, "variables", "variables")
        prefixes = [tf.train.latest_checkpoint(path) or saved_model, saved_model]
    for prefix in prefixes:
        if not tf.io.gfile.exists(f"{prefix}.index"):
            continue
        source = _Checkpoint(prefix, _reader(prefix))
        if source.shards:
            return source
        # Of a `FileSystemSaver`, beside the checkpoint.
        step = re.search(r"-\d+$", prefix)
        name = f"TFRADynamicEmbedding{step[0] if step else ''}"
        folders.append(os.path.join(os.path.dirname(prefix), name))
    for one in folders:
        if os.path.isdir(one) and (files := _Folder(one)).shards:
            return files
    raise FileNotFoundError(
        "There is no table of TFRA's: give the prefix of a checkpoint, as 'folder/ckpt-1', its "
        "folder, that of a SavedModel, or one with files such as 'NAME_mht_1of1_rank0_size1-keys'. "
        f"Received: path={path!r}"
    )


def _reader(prefix: str) -> Any:
    try:
        return tf.train.load_checkpoint(prefix)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise OSError(f"Cannot read the checkpoint {prefix}. Received: {error}") from error


def _order(layer: Any, source: _Source, name: str, found: set[str]) -> list[str]:
    """Slots of the file in the order of those of the layer's optimizer."""
    if not (found and is_keyed(layer.table)):
        return []  # Of a layer that is not built, `insert` says so.
    value, start = layer.table._value, f"{layer.table.path.replace('/', '_')}_"
    optimizer = getattr(value, "table", value).optimizer
    every = [] if optimizer is None else [v.name for v in optimizer.variables if is_keyed(v)]
    wanted = [one.removeprefix(start) for one in every if one.startswith(start)]
    wanted = [one for one in wanted if one in _SLOTS.values()]
    own = {_SLOTS[slot]: slot for slot in found}
    if set(wanted) != set(own):
        raise ValueError(
            f"{source.path} has the slots {sorted(found)} of the table '{name}', and the optimizer "
            f"has {wanted} of the layer '{layer.name}'. Compile the model with the same optimizer "
            "and build it, `model.optimizer.build(model.trainable_variables)`, or go without: "
            f"`slots=False`. Received: slots=True with {optimizer and optimizer.name}"
        )
    return [own[slot] for slot in wanted]


def _places(
    keys: np.ndarray, other: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Values of another table in the order of keys, and which of these it has."""
    theirs, values = other
    if np.array_equal(keys, theirs):
        return values, np.ones(len(keys), bool)
    if not len(theirs):
        return np.zeros([len(keys), values.shape[-1]], values.dtype), np.zeros(len(keys), bool)
    order = np.argsort(theirs, kind="stable")
    places = order[np.minimum(np.searchsorted(theirs, keys, sorter=order), len(theirs) - 1)]
    return values[places], theirs[places] == keys


def _split(
    keys: Any, rows: Any, slots: Sequence[Any], counts: Any, known: np.ndarray
) -> Iterator[Part]:
    """Keys with all slots, and those that begin with the optimizer's own."""
    if known.all():
        yield keys, rows, slots or None, counts
        return
    for mask, own in ((known, [slot[known] for slot in slots]), (~known, None)):
        yield keys[mask], rows[mask], own, None if counts is None else counts[mask]
