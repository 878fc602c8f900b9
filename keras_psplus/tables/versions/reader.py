"""Reading of published tables, by a process that serves."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import seconds, shown
from keras_psplus.files import digests
from keras_psplus.log import logger
from keras_psplus.tables import initial_rows
from keras_psplus.tables.keys import to_keys
from keras_psplus.tables.versions import manifest
from keras_psplus.tables.versions.segments import Segment, Segments, of_changes

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
        content = manifest.read(self._folder)
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
            problem = digests.problem_of(path, digest)
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
