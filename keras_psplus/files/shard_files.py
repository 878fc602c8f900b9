"""Files of tensors: TensorFlow's checkpoints, in which a server's rows are written part by part.

Each server writes its own checkpoint. Of a variable of rows it holds slices of a few MiB, so
that neither who writes nor who reads it ever has more than that in memory beside the table.
"""

import contextlib
import fnmatch
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from keras_psplus.files import atomic, file_errors

# What is read at once, and what is written at once and makes one file.
_SLICE_BYTES = 4 << 20
_FILE_BYTES = 128 << 20
# Where TensorFlow's operation was, which says nothing to people.
_NODE = re.compile(r"\{\{.*?\}\}\s*")


def rows_of(rows: int, server: int, servers: int) -> int:
    """Number of rows of a table on one server."""
    return (rows - server + servers - 1) // servers


def full_path(directory: str | os.PathLike[str]) -> str:
    """A folder's path that means the same in all tasks, wherever they were started."""
    path = os.fspath(directory)
    return path if "://" in path else os.path.abspath(path)


def translate_file_errors(what: str, directory: str) -> contextlib.AbstractContextManager[None]:
    """Says what to do about a disk that is full or that is another one.

    Args:
        what: `"write"` or `"read"`.
        directory: The folder that was given.

    Raises:
        OSError: In place of what TensorFlow or the system raises.
    """
    fix = {
        "write": "Free space there, or give a directory in which this task can write. What was "
        "whole there before is as it was.",
        "read": "It must be a directory that this task reaches: one that all of them share, or "
        "else each has to run on the same host as when it was written, as many as then.",
    }[what]
    return file_errors.translated(
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
        write_text(path, name)
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
            atomic.sync(name)
        atomic.sync(os.path.dirname(path))
    except BaseException:
        remove(path)
        raise


def read(path: str, name: str, shape: tuple[int, int], first: int, count: int) -> np.ndarray:
    """Rows of a variable, as a NumPy array.

    Args:
        path: Path of a checkpoint, without ending.
        name: The variable's name there.
        shape: Its rows and the numbers in a row.
        first: Number of the first row.
        count: How many.
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
        name: The variable's name there.
        shape: Rows of the whole table, and the numbers in a row.
        server: Index of this server.
        servers: Number of servers now.
        progress: Function that is called after every part.
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
    """Number of rows that are written and read at once."""
    return max(1, _SLICE_BYTES // (4 * dim))


def write_text(path: str, text: str) -> None:
    """Writes a small file: it appears whole or not at all."""
    own = f"{path}.part"
    with tf.io.gfile.GFile(own, "w") as file:
        file.write(text)
    atomic.sync(own)
    tf.io.gfile.rename(own, path, overwrite=True)
    atomic.sync(os.path.dirname(path))


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
