"""Writing of versions: what a kill leaves at any moment is the last whole one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_psplus.files import atomic, digests, shard_files
from keras_psplus.tables.changes import Changes, needs_whole
from keras_psplus.tables.versions import manifest


class VersionWriter:
    """Writes versions of tables to a folder.

    Args:
        folder: Its path.
        specs: What each table's `RowStore` takes, by names.

    Raises:
        ValueError: If other tables are published there.
    """

    def __init__(self, folder: str, specs: Mapping[str, dict[str, Any]]) -> None:
        self._folder = folder
        self._tables = [
            {"name": name, **{what: spec[what] for what in ("dim", "default", "initializer")}}
            for name, spec in specs.items()
        ]
        os.makedirs(folder, exist_ok=True)
        before = manifest.read(folder)
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
        tables = [self._write_table(number, i, one) for i, one in enumerate(changes)]
        atomic.sync(self._folder)
        follows = None if is_whole else self._versions[-1]["version"]
        version = {
            "version": number,
            "follows": follows,
            "step": step,
            "seconds": time.time(),
            "tables": tables,
        }
        versions = [version] if is_whole else [*self._versions, version]
        content = {"format": manifest.FORMAT, "tables": self._tables, "versions": versions}
        path = os.path.join(self._folder, manifest.NAME)
        shard_files.write_text(path, digests.to_json(content))
        if is_whole:
            self._before = _names(self._versions) or self._before
        self._versions = versions
        if is_whole:
            self._clear()

    def _write_table(self, number: int, i: int, changes: Changes) -> dict[str, Any]:
        files = {}
        for what, dtype in manifest.ARRAYS.items():
            if what == "gone" and changes.is_whole:
                continue
            name = manifest.file_name(number, i, what)
            path = os.path.join(self._folder, name)
            np.save(path, getattr(changes, what).astype(dtype, copy=False))
            atomic.sync(path)
            files[name] = digests.digest_of_file(path)
        return {"changes": len(changes.keys) + len(changes.gone), "files": files}

    def _clear(self) -> None:
        """Deletes what no list names: older versions, and what a killed writer has left."""
        kept = self._before | _names(self._versions)
        for name in os.listdir(self._folder):
            if manifest.FILE.fullmatch(name) and name not in kept:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, name))


def _names(versions: list[dict[str, Any]]) -> set[str]:
    return {name for one in versions for name in manifest.files_of(one)}
