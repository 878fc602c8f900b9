"""Published versions of a model: files that never change, and their list, written last."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from keras_psplus.files import integrity
from keras_psplus.files.replace import replace, sync
from keras_psplus.tables.snapshot import Changes, needs_whole

# List of the versions in a folder.
#
#     manifest.json         tables, and versions: a whole one, and changes that follow one another
#     VERSION-TABLE-WHAT.npy    `keys` (sorted) and `rows`, and of changes `gone`
#     VERSION-weights.bin   all other weights, of the last version alone
#     VERSION-model         SavedModel that takes them, and rows, of this version and later ones
#
# The list is renamed into place once all that it names is on the disk.


NAME = "manifest.json"
FORMAT = 1
# Arrays of a version, with their types; a whole one has the first two.
ARRAYS = {"keys": np.int64, "rows": np.float32, "gone": np.int64}
# Attributes that a missing row depends on.
_OF_MISSING = "dim", "default", "initializer", "constraint", "rows_dtype"
FILE = re.compile(r"\d{8,}-(\d+-(keys|rows|gone)\.npy|weights\.bin|model)")


def file_name(version: int, table: int, what: str) -> str:
    return f"{version:08d}-{table}-{what}.npy"


def names_in(content: dict[str, Any] | None) -> set[str]:
    """Names of all that a list needs beside it."""
    if content is None:
        return set()
    model = content["model"]
    names = {n for v in content["versions"] for table in v["tables"] for n in table["files"]}
    return names if model is None else names | {model["folder"], model["file"]}


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


def shapes_of(tables: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(table["name"], table["dim"]) for table in tables]


def _check_form(content: dict[str, Any]) -> None:
    """Raises an error if a list lacks what this module reads of it."""
    names = shapes_of(content["tables"])
    model = content["model"]
    if model is not None and model.keys() != {"folder", "files", "weights", "file", "digest"}:
        raise ValueError("the model in it is not one of its versions")
    for version in content["versions"]:
        if len(version["tables"]) != len(names) or {"version", "follows", "step"} - version.keys():
            raise ValueError("a version in it is not of its tables")
    if not names_in(content) or not names or not content["versions"]:
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
    """Writes versions of tables, and of the model around them, to a folder.

    Args:
        specs: What each table's `RowStore` takes, by names.
        save: Function of a path that writes the model without its weights; None for tables alone.

    Attributes:
        model: Folder and files of the model that the next version has; None to write it again.
    """

    def __init__(
        self,
        folder: str,
        specs: Mapping[str, dict[str, Any]],
        save: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._save = folder, save
        self.model: dict[str, Any] | None = None
        self._tables = [
            {"name": name, **{what: spec.get(what) for what in _OF_MISSING}}
            for name, spec in specs.items()
        ]
        with translated(folder):
            os.makedirs(folder, exist_ok=True)
        before = read(folder)
        self._content: dict[str, Any] | None = None
        self._last = 0
        if before is not None:
            shapes = [shapes_of(of) for of in (before["tables"], self._tables)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"Other tables are published to {folder}. Give these a folder of their own. "
                    f"Received: {shapes[1]}, where there are {shapes[0]}"
                )
            self._last = before["versions"][-1]["version"]
        # Of the list before this one, and of the last one before it that began with another whole
        # version: readers may still be opening them.
        self._before = self._former = names_in(before)
        self._clear()

    @property
    def _versions(self) -> list[dict[str, Any]]:
        return [] if self._content is None else self._content["versions"]

    @property
    def needs_whole(self) -> bool:
        """Whether the next version has to have all rows."""
        return needs_whole([sum(t["changes"] for t in v["tables"]) for v in self._versions])

    def write(self, changes: list[Changes], step: int, weights: Sequence[np.ndarray] = ()) -> None:
        """Writes one more version, of all tables and all other weights.

        Args:
            changes: Of each table; if one of them is of all rows, all are.
            step: Steps of training so far.
            weights: Those that the model takes.
        """
        # Not used again if this fails.
        number = self._last = self._last + 1
        try:
            content = self._write(number, changes, step, weights)
        except OSError:
            # Remove files that no list names, as they take room.
            with contextlib.suppress(OSError, ValueError):
                self._clear(names_in(read(self._folder)))
            raise
        self._before = names_in(self._content) or self._before
        if len(content["versions"]) == 1:
            self._former = self._before
        self._content = content
        if self._save is not None or len(content["versions"]) == 1:
            self._clear()

    def _write(
        self, number: int, changes: list[Changes], step: int, weights: Sequence[np.ndarray]
    ) -> dict[str, Any]:
        tables = [self._write_table(number, i, one) for i, one in enumerate(changes)]
        model = None if self._save is None else self._write_model(number, weights, self._save)
        sync(self._folder)
        before = [] if all(one.is_whole for one in changes) else self._versions
        version = {
            "version": number,
            "follows": before[-1]["version"] if before else None,
            "step": step,
            "seconds": time.time(),
            "tables": tables,
        }
        content = {
            "format": FORMAT,
            "tables": self._tables,
            "model": model,
            "versions": [*before, version],
        }
        path = os.path.join(self._folder, NAME)
        with translated(path):
            replace(path, integrity.to_json(content).encode())
        return content

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

    def _write_model(
        self, number: int, weights: Sequence[np.ndarray], save: Callable[[str], None]
    ) -> dict[str, Any]:
        if self.model is None:
            folder, files = f"{number:08d}-model", {}
            path = os.path.join(self._folder, folder)
            with translated(path):
                save(path)
                for where, _, names in os.walk(path):
                    for name in names:
                        file = os.path.join(where, name)
                        sync(file)
                        files[os.path.relpath(file, path)] = integrity.digest_of_file(file)
                    sync(where)
            self.model = {"folder": folder, "files": files}
        name = f"{number:08d}-weights.bin"
        path = os.path.join(self._folder, name)
        with translated(path):
            with open(path, "wb") as out:
                out.writelines(np.ascontiguousarray(one).tobytes() for one in weights)
            sync(path)
            digest = integrity.digest_of_file(path)
        forms = [{"shape": list(one.shape), "dtype": one.dtype.name} for one in weights]
        return {**self.model, "weights": forms, "file": name, "digest": digest}

    def _clear(self, listed: Collection[str] = ()) -> None:
        """Deletes what no list names: older versions, and what a killed writer has left."""
        kept = self._before | self._former | names_in(self._content) | set(listed)
        if self.model is not None:
            kept.add(self.model["folder"])
        for name in os.listdir(self._folder):
            if FILE.fullmatch(name) and name not in kept:
                path = os.path.join(self._folder, name)
                if name.endswith("-model"):
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
