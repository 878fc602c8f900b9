"""Reader of what a training job publishes, in a process that serves."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import seconds, shown
from keras_psplus.files import integrity
from keras_psplus.log import logger
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables.keys import to_keys
from keras_psplus.tables.versions import Segment, Segments, of_changes, read, shapes_of

# Readings of a list whose files were deleted in the meantime.
_ATTEMPTS = 5
# For the version that is being read when Python ends.
_END_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Version:
    """All that an answer needs; replaced as a whole, never changed."""

    content: dict[str, Any]
    tables: dict[str, Segments]
    # Has `keys`, of the inputs and weights, and `serve`, of these, keys and rows.
    graph: Any = None
    weights: tuple[tf.Tensor, ...] = ()

    @functools.cached_property
    def makers(self) -> dict[str, Any]:
        """Functions of keys that make the rows of those that have none; None for zeros."""
        return {
            table["name"]: initial_rows.maker_of_missing(table) for table in self.content["tables"]
        }

    @property
    def last(self) -> dict[str, Any]:
        return self.content["versions"][-1]

    def answer(self, inputs: Sequence[Any]) -> Any:
        # In its place, TensorFlow would look for the function that fits, weight by weight.
        needed, serve = (one.concrete_functions[0] for one in (self.graph.keys, self.graph.serve))
        keys, given = needed(*inputs, *self.weights), []
        for name, table in self.tables.items():
            wanted = keys[name].numpy()
            rows, has_row = table.lookup(wanted)
            given += [tf.constant(wanted[has_row]), tf.constant(rows[has_row])]
        return serve(*inputs, *self.weights, *given)


class PublishedModel:
    """A model that a training job publishes, as a function of its inputs.

    A call has the weights and rows of one version: the latest one that the reader has read. What it
    takes and returns is what `serve` of an exported model does. Calls may come from several threads
    and wait for no new version.
    """

    def __init__(self, latest: Callable[[], _Version]) -> None:
        self._latest = latest

    @property
    def version(self) -> int:
        """Number of the version that the next call has."""
        return self._latest().last["version"]

    @property
    def step(self) -> int:
        """Steps of training before that version."""
        return self._latest().last["step"]

    def pinned(self) -> PublishedModel:
        """Returns the model of the present version, which newer ones leave as it is.

        For several calls that belong together.
        """
        version = self._latest()
        return PublishedModel(lambda: version)

    def __call__(self, *inputs: Any) -> Any:
        return self._latest().answer(inputs)


class TableReader:
    """Reader of the tables, and the model around them, that a training job publishes.

    All tables, and all other weights, are of one version, which is replaced as a whole. A thread
    follows new versions; a lookup, or a call of the model, waits for nothing. Where a new version
    cannot be read, the last one stays, and a warning says why. The files of whole versions of
    tables are mapped into memory. The process needs this library, and nothing of the script that
    trains.

    Args:
        folder: That of `serving.PublishTables`.
        poll: Seconds between two looks for a new version; None to look in `refresh` alone.

    Attributes:
        names: Names of the tables.

    Raises:
        FileNotFoundError: If nothing is published there yet.
        ValueError: If the folder is damaged.

    Example:

    ```python
    reader = keras_psplus.serving.TableReader("published")
    rows = reader.lookup([[17, 2**40], [3, 17]], "items/table")  # of shape (2, 2, dim)
    model = reader.model()  # of PublishTables(..., model=True)
    outputs = model(tf.constant([[17, 2**40]]))
    ```
    """

    def __init__(self, folder: str | os.PathLike[str], poll: float | None = 0.2) -> None:
        poll = seconds("poll", poll, or_none=True)
        self._folder = os.fspath(folder)
        self._shapes = shapes_of(self._read_list()["tables"])
        self.names = [name for name, _ in self._shapes]
        self._refreshing, self._has_model = threading.Lock(), False
        self._latest = self._load(None)
        self._closed = threading.Event()
        if poll is not None:
            args = weakref.ref(self), self._closed, poll
            thread = threading.Thread(target=_follow, args=args, name="TableReader", daemon=True)
            thread.start()
            atexit.register(_end, self._closed, thread)

    @property
    def version(self) -> int:
        """Number of the version that lookups have now."""
        return self._latest.last["version"]

    @property
    def step(self) -> int:
        """Steps of training before that version."""
        return self._latest.last["step"]

    def count(self, name: str | None = None) -> int:
        """Number of keys that have a row.

        Args:
            name: Name of the table, needed if there are several.
        """
        return self._latest.tables[self._checked(name)].count()

    def lookup(self, ids: Any, name: str | None = None) -> Any:
        """Rows of ids, all of one version.

        Args:
            ids: Array of integers or strings; or a dict of them, by the names of tables.
            name: Name of the table of an array, needed if there are several.

        Returns:
            float32 array of the shape of `ids` and the numbers of a row, or a dict of them; an id
            without a row has what the layer's `default` says.
        """
        latest = self._latest
        if isinstance(ids, Mapping):
            return {one: self._rows(latest, ids[one], self._checked(one)) for one in ids}
        return self._rows(latest, ids, self._checked(name))

    def model(self) -> PublishedModel:
        """Returns the model, of which each call has the latest version.

        Raises:
            ValueError: If tables alone are published, or the model is damaged.
        """
        with self._refreshing:
            before, self._has_model = self._has_model, True
            try:
                self._latest = self._load(self._latest)
            except BaseException:
                self._has_model = before
                raise
        return PublishedModel(lambda: self._latest)

    def refresh(self) -> bool:
        """Takes the latest version, and tells whether there was a new one.

        Raises:
            ValueError: If it is damaged, or does not fit; lookups then have the last one.
        """
        with self._refreshing:
            before = self._latest
            self._latest = self._load(before)
            return self._latest is not before

    def close(self) -> None:
        """Ends the thread that follows new versions."""
        self._closed.set()

    def _checked(self, name: str | None) -> str:
        if name is None and len(self.names) == 1:
            return self.names[0]
        if name not in self.names:
            raise ValueError(
                f"There are other tables in {self._folder}: give the `name` of one of "
                f"{self.names}. Received: name={shown(name)}"
            )
        return name

    def _rows(self, of: _Version, ids: Any, name: str) -> np.ndarray:
        array = np.asarray(ids)
        if not array.size:
            # NumPy gives an empty list another type.
            array = array.astype(np.int64)
        if array.dtype == np.int64:
            keys = array.reshape(-1)
        else:
            keys = to_keys(tf.reshape(tf.convert_to_tensor(array), [-1]), name).numpy()
        rows, has_row = of.tables[name].lookup(keys)
        make = of.makers[name]
        if make is not None and not has_row.all():
            rows[~has_row] = make(tf.constant(keys[~has_row])).numpy()
        return rows.reshape(*array.shape, rows.shape[1])

    def _read_list(self) -> dict[str, Any]:
        content = read(self._folder)
        if content is None:
            raise FileNotFoundError(
                f"No table is published in {self._folder} yet: train with "
                "callbacks=[keras_psplus.serving.PublishTables(...)]. "
                f"Received: folder={shown(self._folder)}"
            )
        return content

    def _load(self, before: _Version | None) -> _Version:
        # While large tables were read, files of the model may have been deleted, but no others.
        reached = before
        for attempt in range(_ATTEMPTS):
            content = self._read_list()
            if shapes_of(content["tables"]) != self._shapes:
                raise ValueError(
                    f"Other tables are published to {self._folder} now. Make another reader. "
                    f"Received: {shapes_of(content['tables'])}, where there were {self._shapes}"
                )
            has_model = before is not None and before.graph is not None
            if before is not None and content == before.content and has_model == self._has_model:
                return before
            try:
                reached = _Version(content, self._tables(reached, content))
                if not self._has_model:
                    return reached
                return _Version(content, reached.tables, *self._model(before, content))
            except FileNotFoundError as error:
                # Deleted after the list was read, for a newer one.
                if attempt == _ATTEMPTS - 1:
                    raise ValueError(
                        f"A file of the tables in {self._folder} is missing: publish them again, "
                        f"to an empty folder. Received: {error}"
                    ) from None
        raise AssertionError

    def _tables(self, before: _Version | None, content: dict[str, Any]) -> dict[str, Segments]:
        versions, tables = content["versions"], {}
        known = [] if before is None else before.content["versions"]
        if before is not None and versions[: len(known)] == known:
            tables, versions = dict(before.tables), versions[len(known) :]
        for version in versions:
            for i, (name, _) in enumerate(self._shapes):
                arrays = self._arrays(version, i)
                if version["follows"] is None:
                    tables[name] = Segments((Segment(arrays["keys"], None, arrays["rows"]),))
                else:
                    tables[name] = tables[name].with_changes(of_changes(**arrays))
        return tables

    def _arrays(self, version: dict[str, Any], table: int) -> dict[str, np.ndarray]:
        """Arrays of a version; those of a whole one are mapped from the disk."""
        found = {}
        mode: Literal["r"] | None = "r" if version["follows"] is None else None
        for name, digest in version["tables"][table]["files"].items():
            array = np.load(self._checked_path(version, name, digest), mmap_mode=mode)
            found[name.rpartition("-")[2].removesuffix(".npy")] = np.asarray(array)
        own, dim = self._shapes[table]
        if found["rows"].shape != (len(found["keys"]), dim):
            raise ValueError(
                f"Version {version['version']} is not one of the table '{own}'. Received: rows of "
                f"shape {found['rows'].shape} in the place of {(len(found['keys']), dim)}"
            )
        return found

    def _model(self, before: _Version | None, content: dict[str, Any]) -> tuple[Any, Any]:
        """Functions and weights of the last version."""
        model, last = content["model"], content["versions"][-1]
        if model is None:
            raise ValueError(
                f"The tables in {self._folder} are published without their model. Train with "
                "callbacks=[keras_psplus.serving.PublishTables(..., model=True)]. "
                f"Received: version {last['version']} of {self.names} alone"
            )
        data = np.fromfile(self._checked_path(last, model["file"], model["digest"]), np.uint8)
        weights, end = [], 0
        for one in model["weights"]:
            dtype, begin = np.dtype(tf.as_dtype(one["dtype"]).as_numpy_dtype), end
            end += math.prod(one["shape"]) * dtype.itemsize
            weights.append(tf.constant(data[begin:end].view(dtype).reshape(one["shape"])))
        if before is not None and before.graph is not None:
            if all(before.content["model"][what] == model[what] for what in ("folder", "files")):
                return before.graph, tuple(weights)
        for name, digest in model["files"].items():
            self._checked_path(last, os.path.join(model["folder"], name), digest)
        try:
            graph = tf.saved_model.load(os.path.join(self._folder, model["folder"]))
        except (OSError, tf.errors.NotFoundError) as error:
            raise FileNotFoundError(f"{error}") from error
        return graph, tuple(weights)

    def _checked_path(self, version: dict[str, Any], name: str, digest: str) -> str:
        path = os.path.join(self._folder, name)
        problem = integrity.problem_of(path, digest)
        if problem and not os.path.exists(path):
            raise FileNotFoundError(path)
        if problem:
            raise ValueError(
                f"Version {version['version']} of what is published in {self._folder} is damaged. "
                f"Publish to an empty folder. Received: {problem}"
            )
        return path


def _end(closed: threading.Event, thread: threading.Thread) -> None:
    # Python aborts with a thread that runs TensorFlow's code as it ends.
    closed.set()
    thread.join(_END_SECONDS)


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
                    "the reader of %s stays at version %d: %s", alive._folder, alive.version, error
                )
        del alive
