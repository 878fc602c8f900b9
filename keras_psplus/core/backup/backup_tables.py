"""Tables of a backup that parameter servers write and read, past the workers' memory.

    tables-*            rows of the tables and of their optimizer's slots, a file for each server,
                        or, of dynamic tables, the rows that have changed since the file before
    tables.json         list of the tables, in the backup's own folder
    latest.weights.h5   there, too: everything else; these tables and slots have no rows

Where such a table lies in a worker now, its rows are read from the servers' files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import by_place, other_variables, variables_of_optimizers
from keras_psplus.errors import TableServerError
from keras_psplus.files import tables as shard_files
from keras_psplus.files.tables import TableFiles
from keras_psplus.tables.local import LocalTable
from keras_psplus.tf_internals import resource_variable_ops


class BackupTables:
    """Base class, of strategies that keep all variables with workers."""

    def is_on_servers(self, variable: Any) -> bool:
        """Whether a variable is a table on servers, or a slot of one."""
        return False

    def any_of(self, model: keras.Model) -> bool:
        """Whether servers have a table of a model."""
        return False

    def parts_on_servers(self, model: keras.Model) -> list[Any]:
        """Tables of a model, and slots of them, that servers write."""
        return []

    def slots_of(self, variable: Any, model: keras.Model) -> list[Any]:
        """The optimizer's slots of a variable, in the order in which they were made."""
        name, shape = f"{variable.path.replace('/', '_')}_", tuple(variable.shape)
        return [
            slot
            for slot in with_slots(model)
            if tuple(slot.shape) == shape
            and getattr(slot, "path", slot.name).rpartition("/")[2].startswith(name)
        ]

    def check_writable(self, model: keras.Model, folder: str) -> None:
        """Sees that servers can write a model's tables to a folder."""

    def begin_write(self, model: keras.Model, folder: str) -> dict[str, Any] | None:
        """Has the servers begin to write their tables as they are; training may go on.

        Returns:
            Content of the list, or None if a server is away and will be back.
        """
        raise NotImplementedError

    def finish_write(
        self, folder: str, content: dict[str, Any], stems: Sequence[str] | None
    ) -> dict[str, Any] | None:
        """Waits until the servers have written, and deletes what nobody needs of earlier states.

        Args:
            content: What `begin_write` has returned.
            stems: Beginnings of the names of files to keep, of states that count; None if that is
                not known.

        """
        raise NotImplementedError

    def note_written(self, folder: str, content: dict[str, Any], at: str) -> None:
        """Notes that what `finish_write` returned belongs to a state that counts from now on.

        Args:
            at: Place in the training, for people.
        """

    def read(
        self, model: keras.Model, folder: str, content: dict[str, Any], is_strict: bool
    ) -> str | None:
        """Has the servers read their tables of a state.

        Args:
            model: The model, whose optimizers have been built.
            is_strict: Whether optimizers have to be the same.

        Returns:
            An error text, or None.
        """
        return None

    def note_ended(self, folder: str, is_kept: bool) -> None:
        """Deletes files of a folder, or has them deleted when the script has ended well."""

    @contextlib.contextmanager
    def set_aside(
        self, model: keras.Model, content: dict[str, Any] | None
    ) -> Iterator[list[tuple[dict[str, Any], list[Any]]]]:
        """Context in which Keras reads a state without the tables that its list has.

        Yields:
            Tables that have to be read here: each one's entry, and its variable and slots.
        """
        places, parts, here = by_place(model), [], []
        for entry in [] if content is None else content["tables"]:
            if entry["place"] is not None:
                variable = places[entry["place"]]
                of_one = [variable, *self.slots_of(variable, model)]
                parts += of_one
                if not self.is_on_servers(variable):
                    here.append((entry, of_one))
        with without_rows(parts):
            yield here


def read_here(
    folder: str,
    listed: dict[str, Any] | None,
    tables: Iterable[tuple[dict[str, Any], list[Any]]],
    is_strict: bool,
) -> str | None:
    """Reads tables that servers have written into variables of this process.

    Args:
        listed: Content of the backup's list.
        tables: As `set_aside` yields them.

    Returns:
        An error text, or None.
    """
    try:
        with shard_files.translate_file_errors("read", folder):
            for entry, (variable, *slots) in tables:
                files, value = TableFiles(folder, listed), variable._value
                has_slots = len(slots) == entry["slots"]
                if isinstance(value, LocalTable):
                    stored = len(slots) if has_slots else 0
                    value.read_files(files.chains, entry["key"], stored)
                else:
                    variable.assign(files.read(entry["name"]))
                    for i, slot in enumerate(slots if has_slots else []):
                        slot.assign(files.read(entry["name"], slot=i))
                if is_strict and not has_slots:
                    return f"{folder} has {entry['slots']} slots of {entry['name']}"
    except (OSError, TableServerError) as error:
        return f"{error}"
    return None


@contextlib.contextmanager
def without_rows(variables: Iterable[Any]) -> Iterator[None]:
    """Context in which Keras saves or loads variables without rows."""
    before = []
    try:
        for variable in variables:
            before.append((variable, variable._value, variable._shape))
            shape = 0, *variable._shape[1:]
            with tf.init_scope(), tf.device("/CPU:0"):
                variable._value = resource_variable_ops.ResourceVariable(
                    tf.zeros(shape, variable._value.dtype), trainable=variable.trainable
                )
            variable._shape = shape
        yield
    finally:
        for variable, value, shape in before:
            variable._value, variable._shape = value, shape


def with_slots(model: keras.Model) -> list[Any]:
    """All variables of a model and of its optimizers."""
    every = *model.variables, *variables_of_optimizers(model), *other_variables(model).values()
    return list({id(variable): variable for variable in every}.values())
