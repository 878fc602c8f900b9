"""Published versions of tables: immutable segments, and a list of them that is written last."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import seconds, shown
from keras_psplus.files import integrity
from keras_psplus.files.replace import replace, sync
from keras_psplus.log import logger
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables.keys import to_keys
from keras_psplus.tables.snapshot import Changes, needs_whole

# List of the versions in a folder.
#
#     manifest.json         tables, and versions: a whole one, and changes that follow one another
#     VERSION-TABLE-WHAT.npy    `keys` (sorted) and `rows`, and of changes `gone`
#
# The list is renamed into place once all that it names is on the disk.


NAME = "manifest.json"
FORMAT = 1
# Arrays of a version, with their types; a whole one has the first two.
ARRAYS = {"keys": np.int64, "rows": np.float32, "gone": np.int64}
# What a row that is missing depends on.
_OF_MISSING = "dim", "default", "initializer", "constraint", "rows_dtype"
FILE = re.compile(r"\d{8,}-\d+-(keys|rows|gone)\.npy")


def file_name(version: int, table: int, what: str) -> str:
    return f"{version:08d}-{table}-{what}.npy"


def files_of(version: dict[str, Any]) -> dict[str, str]:
    """Digests of a version's files, by their names."""
    return {name: digest for table in version["tables"] for name, digest in table["files"].items()}


def read(folder: str) -> dict[str, Any] | None:
    """Reads the list of a folder; None if there is none.

    Raises:
        ValueError: If it is damaged, or another library's, or versions do not follow one another.
        OSError: If there is something else in its place, or it cannot be read.
    """
    path = os.path.join(folder, NAME)
    try:
        integrity.check_regular(path)
        with open(path, "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(
            f"The list of published tables, {path}, cannot be read. See to what is there, or "
            f"publish to an empty folder. Received: {error.strerror or error}"
        ) from error
    try:
        content = integrity.from_json(text, must_have_digest=True)
        if content.get("format") == FORMAT:
            _check_form(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"The list of published tables in {path} is damaged: {error}. Publish them to an empty "
            f"folder. Received: {text[:80]!r}"
        ) from None
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a list of published tables that this version of keras_psplus reads. "
            f"Received: format={content.get('format')}"
        )
    _check_order(content["versions"], path)
    return content


def _check_form(content: dict[str, Any]) -> None:
    """Raises an error if a list lacks what this module reads of it."""
    names = [(table["name"], table["dim"]) for table in content["tables"]]
    for version in content["versions"]:
        if len(version["tables"]) != len(names) or {"version", "follows", "step"} - version.keys():
            raise ValueError("a version in it is not of its tables")
        files_of(version).items()
    if not names or not content["versions"]:
        raise ValueError("it has no tables, or no versions of them")


def _check_order(versions: list[dict[str, Any]], path: str) -> None:
    before = None
    for version in versions:
        if version["follows"] != before:
            raise ValueError(
                f"A version in {path} does not fit the one before it: changes that others made are "
                "missing. Publish the tables to an empty folder. "
                f"Received: version {version['version']}, which follows {version['follows']}, "
                f"after {before}"
            )
        before = version["version"]


# Keys and rows of versions, one on top of the other, which never change.


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


# Reading of published tables, by a process that serves.


# Readings of a list whose files were deleted in the meantime.
_ATTEMPTS = 5


@dataclasses.dataclass(frozen=True, eq=False)
class _State:
    """All that a lookup needs; replaced as a whole, never changed."""

    versions: list[dict[str, Any]]
    segments: Segments


class TableReader:
    """Rows of a table that a training job publishes, at their latest version.

    The files of whole versions are mapped into memory. A thread follows new versions; a lookup has
    the rows of one version, and waits for nothing. Where a new version cannot be read, the last one
    stays, and a warning says why.

    Args:
        folder: That of `callbacks.PublishTables`.
        name: Name of the table, as `names` of another reader has them; needed if there are several.
        poll: Seconds between two looks for a new version; None to look in `refresh` alone.

    Attributes:
        names: Names of the tables in the folder.
        dim: Numbers in a row.

    Raises:
        FileNotFoundError: If nothing is published there yet.
        ValueError: If the folder has no such table, or is damaged.

    Example:

    ```python
    reader = keras_psplus.serving.TableReader("published")
    rows = reader.lookup([[17, 2**40], [3, 17]])  # of shape (2, 2, dim)
    ```
    """

    def __init__(
        self, folder: str | os.PathLike[str], name: str | None = None, poll: float | None = 0.2
    ) -> None:
        poll = seconds("poll", poll, or_none=True)
        self._folder = os.fspath(folder)
        content = self._read_list()
        self.names = [table["name"] for table in content["tables"]]
        if name is None and len(self.names) == 1:
            (name,) = self.names
        if name is None or name not in self.names:
            raise ValueError(
                f"There are other tables in {self._folder}: give the `name` of one of "
                f"{self.names}. Received: name={shown(name)}"
            )
        self.name = name
        self._spec = content["tables"][self.names.index(name)]
        self.dim: int = self._spec["dim"]
        self._initial = initial_rows.maker_of_missing(self._spec)
        self._refreshing = threading.Lock()
        self._state = self._load(None)
        self._closed = threading.Event()
        if poll is not None:
            args = weakref.ref(self), self._closed, poll
            threading.Thread(target=_follow, args=args, name="TableReader", daemon=True).start()

    @property
    def version(self) -> int:
        """Number of the version that lookups have now."""
        return self._state.versions[-1]["version"]

    @property
    def step(self) -> int:
        """Steps of training before that version."""
        return self._state.versions[-1]["step"]

    def __len__(self) -> int:
        return self._state.segments.count()

    def lookup(self, ids: Any) -> np.ndarray:
        """Rows of ids, all of one version.

        Args:
            ids: Array of integers or strings.

        Returns:
            float32 array of the shape of `ids` and `dim`; an id without a row has what the layer's
            `default` says.
        """
        array = np.asarray(ids)
        if not array.size:
            # NumPy gives an empty list another type.
            array = array.astype(np.int64)
        if array.dtype == np.int64:
            keys = array.reshape(-1)
        else:
            keys = to_keys(tf.reshape(tf.convert_to_tensor(array), [-1]), self.name).numpy()
        rows, has_row = self._state.segments.lookup(keys)
        if self._initial is not None and not has_row.all():
            rows[~has_row] = self._initial(tf.constant(keys[~has_row])).numpy()
        return rows.reshape(*array.shape, self.dim)

    def refresh(self) -> bool:
        """Takes the latest version, and tells whether there was a new one.

        Raises:
            ValueError: If it is damaged, or does not fit; lookups then have the last one.
        """
        with self._refreshing:
            before = self._state
            self._state = self._load(before)
            return self._state is not before

    def close(self) -> None:
        """Ends the thread that follows new versions."""
        self._closed.set()

    def _read_list(self) -> dict[str, Any]:
        content = read(self._folder)
        if content is None:
            raise FileNotFoundError(
                f"No table is published in {self._folder} yet: train with "
                "callbacks=[keras_psplus.callbacks.PublishTables(...)]. "
                f"Received: folder={shown(self._folder)}"
            )
        return content

    def _load(self, before: _State | None) -> _State:
        for attempt in range(_ATTEMPTS):
            content = self._read_list()
            found = [(t["name"], t["dim"]) for t in content["tables"]]
            if (self.name, self.dim) not in found:
                raise ValueError(
                    f"Other tables are published to {self._folder} now. Make another reader. "
                    f"Received: {found}, where there was '{self.name}' with rows of {self.dim}"
                )
            try:
                return self._extended(before, content, found.index((self.name, self.dim)))
            except FileNotFoundError as error:
                # Deleted after the list was read, for a newer one.
                if attempt == _ATTEMPTS - 1:
                    raise ValueError(
                        f"A file of the tables in {self._folder} is missing: publish them again, "
                        f"to an empty folder. Received: {error}"
                    ) from None
        raise AssertionError

    def _extended(self, before: _State | None, content: dict[str, Any], table: int) -> _State:
        versions, segments, known = content["versions"], None, 0
        if before is not None and versions[: len(before.versions)] == before.versions:
            known, segments = len(before.versions), before.segments
            if known == len(versions):
                return before
        for version in versions[known:]:
            arrays = self._arrays(version, table)
            if segments is None:
                segments = Segments((Segment(arrays["keys"], None, arrays["rows"]),))
            else:
                segments = segments.with_changes(of_changes(**arrays))
        assert segments is not None
        return _State(versions, segments)

    def _arrays(self, version: dict[str, Any], table: int) -> dict[str, np.ndarray]:
        """Arrays of a version, which stay on the disk until they are used."""
        found = {}
        for name, digest in version["tables"][table]["files"].items():
            path = os.path.join(self._folder, name)
            if not os.path.exists(path):
                raise FileNotFoundError(path)
            problem = integrity.problem_of(path, digest)
            if problem:
                raise ValueError(
                    f"Version {version['version']} of the table '{self.name}' is damaged. Publish "
                    f"the tables to an empty folder. Received: {problem}"
                )
            array = np.load(path, mmap_mode="r")
            found[name.rpartition("-")[2].removesuffix(".npy")] = np.asarray(array)
        wanted = (len(found["keys"]), self.dim)
        if found["rows"].shape != wanted:
            raise ValueError(
                f"Version {version['version']} is not one of the table '{self.name}'. "
                f"Received: rows of shape {found['rows'].shape} in the place of {wanted}"
            )
        return found


def _follow(reader: weakref.ref[TableReader], closed: threading.Event, poll: float) -> None:
    said = ""
    while not closed.wait(poll):
        alive = reader()
        if alive is None:
            return
        try:
            alive.refresh()
        except Exception as error:
            if f"{error}" != said:
                said = f"{error}"
                logger.warning(
                    "the table '%s' stays at version %d: %s", alive.name, alive.version, error
                )
        del alive


# Writing of versions: what a kill leaves at any moment is the last whole one.


def translated(path: str) -> contextlib.AbstractContextManager[None]:
    """Context in which errors of a file or folder say what to do about it."""
    return integrity.translated(
        lambda reason: (
            f"The tables could not be published to {path}; the last version there, if there is "
            "one, stays. Make room on that disk, or see to its rights and to what is there. "
            f"Received: {reason}"
        )
    )


class VersionWriter:
    """Writes versions of tables to a folder.

    Args:
        specs: What each table's `RowStore` takes, by names.
    """

    def __init__(self, folder: str, specs: Mapping[str, dict[str, Any]]) -> None:
        self._folder = folder
        self._tables = [
            {"name": name, **{what: spec.get(what) for what in _OF_MISSING}}
            for name, spec in specs.items()
        ]
        with translated(folder):
            os.makedirs(folder, exist_ok=True)
        before = read(folder)
        self._versions: list[dict[str, Any]] = []
        self._last = 0
        # Of the list before: readers may still be opening them.
        self._before: set[str] = set()
        if before is not None:
            shapes = [
                [(t["name"], t["dim"]) for t in of] for of in (before["tables"], self._tables)
            ]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"Other tables are published to {folder}. Give these a folder of their own. "
                    f"Received: {shapes[1]}, where there are {shapes[0]}"
                )
            self._last = before["versions"][-1]["version"]
            self._before = _names(before["versions"])
        self._clear()

    @property
    def needs_whole(self) -> bool:
        """Whether the next version has to have all rows."""
        return needs_whole([sum(t["changes"] for t in v["tables"]) for v in self._versions])

    def write(self, changes: list[Changes], step: int) -> None:
        """Writes one more version, of all tables.

        Args:
            changes: Of each table; if one of them is of all rows, all are.
            step: Steps of training so far.
        """
        is_whole = all(one.is_whole for one in changes)
        # Not used again if this fails.
        number = self._last = self._last + 1
        try:
            self._write(number, changes, step, is_whole)
        except OSError:
            # What no list names, so that it takes no room.
            with contextlib.suppress(OSError, ValueError):
                listed = read(self._folder)
                self._clear(set() if listed is None else _names(listed["versions"]))
            raise
        if is_whole:
            self._clear()

    def _write(self, number: int, changes: list[Changes], step: int, is_whole: bool) -> None:
        tables = [self._write_table(number, i, one) for i, one in enumerate(changes)]
        sync(self._folder)
        follows = None if is_whole else self._versions[-1]["version"]
        version = {
            "version": number,
            "follows": follows,
            "step": step,
            "seconds": time.time(),
            "tables": tables,
        }
        versions = [version] if is_whole else [*self._versions, version]
        content = {"format": FORMAT, "tables": self._tables, "versions": versions}
        path = os.path.join(self._folder, NAME)
        with translated(path):
            replace(path, integrity.to_json(content).encode())
        if is_whole:
            self._before = _names(self._versions) or self._before
        self._versions = versions

    def _write_table(self, number: int, i: int, changes: Changes) -> dict[str, Any]:
        files = {}
        for what, dtype in ARRAYS.items():
            if what == "gone" and changes.is_whole:
                continue
            name = file_name(number, i, what)
            path = os.path.join(self._folder, name)
            with translated(path):
                np.save(path, getattr(changes, what).astype(dtype, copy=False))
                sync(path)
                files[name] = integrity.digest_of_file(path)
        return {"changes": len(changes.keys) + len(changes.gone), "files": files}

    def _clear(self, listed: Collection[str] = ()) -> None:
        """Deletes what no list names: older versions, and what a killed writer has left."""
        kept = self._before | _names(self._versions) | set(listed)
        for name in os.listdir(self._folder):
            if FILE.fullmatch(name) and name not in kept:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, name))


def _names(versions: list[dict[str, Any]]) -> set[str]:
    return {name for one in versions for name in files_of(one)}
