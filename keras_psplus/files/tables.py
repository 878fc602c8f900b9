"""Files of tensors and tables, of which each server writes a part."""

import contextlib
import fnmatch
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.files import integrity
from keras_psplus.files.integrity import open_file
from keras_psplus.files.replace import replace, sync

# Files of tensors: TensorFlow's checkpoints, in which a server's rows are written part by part.
#
# Each server writes its own checkpoint. Of a variable of rows it holds slices of a few MiB, so
# that neither who writes nor who reads it ever has more than that in memory beside the table.


# Bytes that are read at once, and those that are written at once and make one file.
_SLICE_BYTES = 4 << 20
_FILE_BYTES = 128 << 20
# Where TensorFlow's operation was, which says nothing to people.
_NODE = re.compile(r"\{\{.*?\}\}\s*")


def rows_of(rows: int, server: int, servers: int) -> int:
    return (rows - server + servers - 1) // servers


def full_path(directory: str | os.PathLike[str]) -> str:
    """A folder's path that means the same in all tasks, wherever they were started."""
    path = os.fspath(directory)
    return path if "://" in path else os.path.abspath(path)


def translate_file_errors(what: str, directory: str) -> contextlib.AbstractContextManager[None]:
    """Says what to do about a disk that is full or that is another one.

    Args:
        what: `"write"` or `"read"`.

    Raises:
        OSError: In place of what TensorFlow or the system raises.
    """
    fix = {
        "write": "Free space there, or give a directory in which this task can write. What was "
        "whole there before is as it was.",
        "read": "It must be a directory that this task reaches: one that all of them share, or "
        "else each has to run on the same host as when it was written, as many as then.",
    }[what]
    return integrity.translated(
        lambda reason: (
            f"cannot {what} its part of what is saved in {directory}. {fix} "
            f"Received: {_NODE.sub('', reason).splitlines()[0][:300]}"
        )
    )


def check_writable(directory: str, name: str) -> None:
    """Sees that a task of this name can write to a folder, which is made.

    Raises:
        OSError: If it cannot.
    """
    path = os.path.join(directory, f".{name}-{uuid.uuid4().hex[:12]}")
    with translate_file_errors("write", directory):
        tf.io.gfile.makedirs(directory)
        replace(path, name.encode())
        tf.io.gfile.remove(path)


def path_of(directory: str, stem: str, server: int, servers: int) -> str:
    """Path, without ending, of one server's files."""
    return os.path.join(directory, f"{stem}-{server}-of-{servers}")


def write(
    path: str,
    variables: dict[str, tf.Variable],
    tensors: dict[str, tf.Tensor],
    progress: Callable[[], None] = lambda: None,
    more: Iterable[dict[str, tf.Tensor]] = (),
) -> None:
    """Writes a checkpoint; when this returns, the disk has it.

    Args:
        path: Its path, without ending. Nothing else may be written there at the same time.
        variables: Dict from names to `tf.Variable`s of rows.
        tensors: Dict from names to tensors that are written as they are.
        progress: Function that is called after every part.
        more: Further parts, dicts from names to tensors.
    """
    folder = f"{path}.parts"
    parts: list[str] = []

    def put(names: list[str], specs: list[str], values: list[tf.Tensor]) -> None:
        parts.append(os.path.join(folder, str(len(parts))))
        tf.raw_ops.SaveV2(
            prefix=parts[-1], tensor_names=names, shape_and_slices=specs, tensors=values
        )
        progress()

    try:
        tf.io.gfile.makedirs(folder)
        with tf.device("/CPU:0"):
            for batch in _batches(variables):
                names, ranges = [name for name, _ in batch], [own for _, own in batch]
                specs = [_spec(variables[n].shape, *own) for n, own in batch]
                put(names, specs, [_rows(variables[n], *own) for n, own in zip(names, ranges)])
            for part in more:
                put(list(part), [""] * len(part), list(part.values()))
            if tensors:
                put(list(tensors), [""] * len(tensors), list(tensors.values()))
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=parts, destination_prefix=path, delete_old_dirs=True
            )
        for name in _files_of(path):
            sync(name)
        sync(os.path.dirname(path))
    except BaseException:
        remove(path)
        raise


def read(path: str, name: str, shape: tuple[int, int], first: int, count: int) -> np.ndarray:
    """Rows of a variable, as a NumPy array.

    Args:
        path: Path of a checkpoint, without ending.
        name: The variable's name there.
        shape: Its rows and the numbers in a row.
    """
    return _restore(path, name, _spec(shape, first, count), tf.float32)


def read_tensor(path: str, name: str, dtype: tf.DType | str) -> np.ndarray:
    """Reads a tensor that was written whole."""
    return _restore(path, name, "", dtype)


def read_share(
    variable: tf.Variable,
    paths: Sequence[str],
    name: str,
    shape: tuple[int, int],
    server: int,
    servers: int,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Reads a server's rows of a table from the files of any number of servers.

    Args:
        variable: `tf.Variable` of the server's rows.
        paths: Paths of the files of all servers that have written, in their order.
        shape: Rows of the whole table, and the numbers in a row.
    """
    rows, dim = shape
    common = math.gcd(len(paths), servers)
    for other, path in enumerate(paths):
        # Otherwise no row of the one can be the other's.
        if (other - server) % common:
            continue
        own = rows_of(rows, other, len(paths))
        for first, count in slices(own, dim):
            ids = other + len(paths) * np.arange(first, first + count, dtype=np.int64)
            mine = ids % servers == server
            if mine.any():
                tf.raw_ops.ResourceScatterUpdate(
                    resource=variable.handle,
                    indices=tf.constant(ids[mine] // servers),
                    updates=tf.constant(read(path, name, (own, dim), first, count)[mine]),
                )
            progress()


def slices(rows: int, dim: int) -> list[tuple[int, int]]:
    """Slices in which a variable is written and read: first rows and counts."""
    most = rows_in_slice(dim)
    return [(first, min(most, rows - first)) for first in range(0, rows, most)]


def rows_in_slice(dim: int) -> int:
    return max(1, _SLICE_BYTES // (4 * dim))


def remove(path: str) -> None:
    """Deletes a checkpoint, or what there is of it."""
    for name in _files_of(path):
        remove_tree(name)


def find(directory: str, pattern: str) -> list[str]:
    """Paths of a folder's entries that match a pattern; none if it does not exist."""
    try:
        found = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    except tf.errors.NotFoundError:
        return []  # Another task, on the same disk, has deleted it meanwhile.
    names = [name.rstrip("/") for name in found]
    return [os.path.join(directory, n) for n in sorted(names) if fnmatch.fnmatchcase(n, pattern)]


def remove_tree(path: str) -> None:
    """Deletes a file or a folder, that another process may be deleting as well."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        tf.io.gfile.rmtree(path) if tf.io.gfile.isdir(path) else tf.io.gfile.remove(path)
    except (OSError, tf.errors.OpError):
        pass  # It is gone.


def _files_of(path: str) -> list[str]:
    return find(os.path.dirname(path), f"{os.path.basename(path)}.*")


def _batches(variables: dict[str, tf.Variable]) -> Iterator[list[tuple[str, tuple[int, int]]]]:
    """Lists of names and ranges of rows, each list of which fits into one file."""
    batch, size = [], 0
    for name, variable in variables.items():
        rows, dim = variable.shape
        for first, count in slices(rows, dim):
            batch.append((name, (first, count)))
            size += 4 * dim * count
            if size >= _FILE_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _rows(variable: tf.Variable, first: int, count: int) -> tf.Tensor:
    return variable.sparse_read(tf.range(first, first + count))


def _spec(shape: Sequence[int], first: int, count: int) -> str:
    rows, dim = shape
    return f"{rows} {dim} {first},{count}:-"


def _restore(path: str, name: str, spec: str, dtype: tf.DType | str) -> np.ndarray:
    with tf.device("/CPU:0"):
        (found,) = tf.raw_ops.RestoreV2(
            prefix=path, tensor_names=[name], shape_and_slices=[spec], dtypes=[dtype]
        )
    return np.asarray(found)


# Files of tables: a folder with all servers' files and a list of contents.
#
# The list, `tables.json`, is written last, by the chief. A folder without it is incomplete, and is
# ignored.


LIST, STEM = "tables.json", "tables"
_FORMAT = 1
# In a folder of backups, whose own folders have the lists, names of those that count.
LATEST, BACKUP = "LATEST", re.compile(r"backup-(\d+)")


class TableFiles:
    """Reads tables that `HybridStrategy.save_tables` has written, in any process and by parts.

    Args:
        directory: The folder, in which the files of all parameter servers must be.
        listed: Content of its list; that of the folder, or of its last backup, by default.

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

    def __init__(
        self, directory: str | os.PathLike[str], listed: dict[str, Any] | None = None
    ) -> None:
        self._directory = os.fspath(directory)
        if listed is None:
            listed = read_list(os.path.join(self._directory, *latest(self._directory)[:1]))
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
            path = path_of(self._directory, self._list["stem"], server, servers)
            # Those of its rows that come before `first`, and before the end.
            ends = first, first + count
            skipped, end = (rows_of(row, server, servers) for row in ends)
            own = rows[(server - first) % servers :: servers]
            shape = rows_of(table["rows"], server, servers), table["dim"]
            for at, size in slices(end - skipped, table["dim"]):
                own[at : at + size] = read(
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
        rows = rows or self._list["servers"] * rows_in_slice(dim)
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
    return [[path_of(directory, stem, i, servers) for stem in every] for i in range(servers)]


def write_list(directory: str, content: dict[str, Any]) -> None:
    """Writes what is in a folder; from now on it counts."""
    path = os.path.join(directory, LIST)
    replace(path, integrity.to_json({"format": _FORMAT, **content}, indent=1).encode())


def latest(directory: str, name: str = LATEST) -> list[str]:
    """Names of the backups that count in a folder of backups, the newest first.

    Raises:
        ValueError: If the file that has them is damaged.
    """
    path = os.path.join(directory, name)
    if not tf.io.gfile.exists(path):
        return []
    with open_file(path) as file:
        names = file.read().decode(errors="replace").split()
    if not names or not all(map(BACKUP.fullmatch, names)):
        raise ValueError(
            f"{path} names no backup. Write the name of one of the folders beside it there. "
            f"Received: {' '.join(names)!r}"
        )
    return list(names)


def read_list(directory: str) -> dict[str, Any] | None:
    """Contents of a folder, a dict, or None if it is incomplete."""
    path = os.path.join(directory, LIST)
    if not tf.io.gfile.exists(path):
        return None
    with open_file(path) as file:
        text = file.read()
    try:
        content = integrity.from_json(text)
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
