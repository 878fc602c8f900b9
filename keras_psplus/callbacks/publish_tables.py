"""Publication of dynamic tables while they are trained."""

from __future__ import annotations

import os
from typing import Any

import keras

from keras_psplus.arguments import shown, whole_number
from keras_psplus.tables.row_variable import KeyedVariable, is_keyed
from keras_psplus.tables.versions import VersionWriter

_EPOCH = "epoch"


class PublishTables(keras.callbacks.Callback):
    """Writes versions of a model's dynamic tables, which `serving.TableReader` follows.

    The first version has all rows, the ones after it those that steps have changed since, and the
    keys that have expired; now and then all rows are written again. A reader finds a version once
    all of it is on the disk: a kill at any moment leaves the last one. With servers, the chief
    writes what they send it; training waits in the meantime.

    Args:
        folder: Path of a folder for the tables of this model alone.
        every: Steps between two versions, or `"epoch"`. The end of training publishes the rest.

    Raises:
        ValueError: If `every` is neither, the model has no dynamic table, or the folder has others.

    Example:

    ```python
    publish = keras_psplus.callbacks.PublishTables("published", every=100)
    model.fit(dataset, epochs=3, callbacks=[publish])
    ```
    """

    def __init__(self, folder: str | os.PathLike[str], every: int | str = _EPOCH) -> None:
        super().__init__()
        if isinstance(every, str) and every != _EPOCH:
            raise ValueError(
                f'`every` must be an int from 1 up, or "epoch". Received: every={shown(every)}'
            )
        # None at epochs' ends.
        self._every = None if every == _EPOCH else whole_number("every", every, 1)
        self.folder = os.fspath(folder)
        self._writer: VersionWriter | None = None
        self._tables: list[KeyedVariable] = []
        self._marks: list[Any] = []
        self._steps, self._last_batch = 0, -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # One call may be for several steps.
        self._steps += batch - self._last_batch if batch > self._last_batch else batch + 1
        self._last_batch = batch
        if self._every is not None and self._steps >= self._every:
            self.publish()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._every is None:
            self.publish()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._steps:
            self.publish()

    def publish(self) -> None:
        """Writes a version now."""
        self._steps = 0
        tables = [v for v in self.model.variables if is_keyed(v)]
        if self._writer is None or any(a is not b for a, b in zip(tables, self._tables)):
            self._begin(tables)
        assert self._writer is not None
        marks = [None] * len(tables) if self._writer.needs_whole else self._marks
        changes = [v._value.read_changes(mark) for v, mark in zip(tables, marks)]
        if any(one.is_whole for one in changes):
            changes = [
                one if one.is_whole else variable._value.read_changes(None)
                for variable, one in zip(tables, changes)
            ]
        if any(one.is_whole or len(one.keys) or len(one.gone) for one in changes):
            iterations = getattr(self.model.optimizer, "iterations", None)
            self._writer.write(changes, 0 if iterations is None else int(iterations.numpy()))
        self._marks = [one.mark for one in changes]

    def _begin(self, tables: list[KeyedVariable]) -> None:
        if not tables:
            raise ValueError(
                "PublishTables publishes the tables of keras_psplus.layers.DynamicEmbedding, of "
                f"which the model has none. Received: model '{self.model.name}'"
            )
        specs = {variable.path: variable._value.spec for variable in tables}
        self._tables, self._writer = tables, VersionWriter(self.folder, specs)
