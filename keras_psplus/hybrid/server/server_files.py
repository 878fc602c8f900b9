"""Files of a parameter server: writes and reads its rows of the tables."""

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.core.base.threads import BackgroundWriter
from keras_psplus.files import tables as shard_files
from keras_psplus.files.tables import STEM, chains, name_of
from keras_psplus.hybrid.server.shard import DynamicShard, TableShard
from keras_psplus.tables import files as dynamic_files

# Files that this module and TensorFlow's operations for it write.
_OWN = re.compile(
    rf"{STEM}-[0-9a-f]+-\d+-of-\d+\.(parts|index(\.tempstate\d+)?|data-\d+-of-\d+(\.tempstate\d+)?)"
)


class ServerFiles:
    """The files of one parameter server.

    Dynamic tables are written by a thread, while they are trained on.

    Args:
        shards: Dict from tables' numbers to `TableShard`s, as the server fills it.
        options: Dict with `server`, its index, and `servers`, their number.

    Attributes:
        progress: Grows while there is something to wait for.
        saves_in_training: Whether `begin_save` will be called while tables are trained.
    """

    def __init__(self, shards: dict[int, TableShard], options: dict[str, Any]) -> None:
        self._shards = shards
        self._server, self._servers = options["server"], options["servers"]
        self.progress, self.saves_in_training = 0, False
        self._writer, self._written = BackgroundWriter(), {"changes": 0, "is_whole": True}
        # Of each folder and beginning of names, the dynamic tables' marks.
        self._marks: dict[tuple[str, str], dict[int, dynamic_files.Mark]] = {}

    def prepare(self) -> None:
        """Sees that training waits no longer for the first backup than for others."""
        if not self.saves_in_training:
            return
        self.settle()
        for shard in self._shards.values():
            if isinstance(shard, DynamicShard) and shard.optimizer is not None:
                shard.prepare_capture()
                self.note_progress()

    def begin_save(self, directory: str, stem: str, follows: Sequence[str] = ()) -> None:
        """Begins to write this server's rows of all tables, and their optimizers' variables.

        When this returns, they may be changed.

        Args:
            stem: How the files' names begin.
            follows: Beginnings of the names of files of all rows, and of changes since, in their
                order: of dynamic tables, what has changed since the last of them is enough.
        """
        with contextlib.suppress(OSError):
            self._writer.finish()  # Nobody has waited for it.
        marks = self._marks_of(directory, follows)
        variables: dict[str, tf.Variable] = {}
        tensors = {"server": tf.constant(self._server)}
        captures: dict[int, dynamic_files.Capture] = {}
        for key, shard in self._shards.items():
            tensors[_counts(key)] = shard.counts()
            if isinstance(shard, DynamicShard):
                captures[key] = shard.capture(key, marks.get(key))
            else:
                variables.update(_variables(shard, key, len(shard.slots)))
        are_variables_written = threading.Event()

        def parts() -> Iterator[Any]:
            are_variables_written.set()
            for capture in captures.values():
                yield from capture.parts()

        def write() -> None:
            try:
                with shard_files.translate_file_errors("write", directory):
                    tf.io.gfile.makedirs(directory)
                    path = self._path(directory, stem)
                    shard_files.write(path, variables, tensors, self.note_progress, parts())
            finally:
                are_variables_written.set()
                for capture in captures.values():
                    capture.close()
            self._marks[directory, stem] = {key: of.mark for key, of in captures.items()}
            self._written = {
                "changes": sum(capture.changes for capture in captures.values()),
                "is_whole": all(capture.is_whole for capture in captures.values()),
            }

        self._writer.start(write)
        are_variables_written.wait()

    @property
    def is_writing(self) -> bool:
        return self._writer.is_writing

    def end_save(self) -> dict[str, Any]:
        """Waits until all is written.

        Returns:
            Dict: `changes`, the rows and keys of dynamic tables that were written, and `is_whole`,
            whether these are all of them.
        """
        self._writer.finish()
        return self._written

    def settle(self) -> None:
        """Waits until nothing is written any more."""
        self._writer.wait()

    def _marks_of(self, directory: str, follows: Sequence[str]) -> dict[int, dynamic_files.Mark]:
        """Marks of the last of some files, if they are still there."""
        paths = [self._path(directory, stem) for stem in follows]
        if not all(tf.io.gfile.exists(f"{path}.index") for path in paths):
            return {}
        return self._marks.get((directory, follows[-1]), {}) if follows else {}

    def load(
        self, directory: str, stems: Sequence[str], servers: int, tables: Sequence[Sequence[int]]
    ) -> None:
        """Reads this server's rows of tables.

        Args:
            stems: How the files' names begin: those of all rows, and of changes since, in order.
            servers: How many servers have written them.
            tables: List of triples: a table's number, its number in the files, and how many
                variables of its optimizer to read.
        """
        self.settle()
        every = chains(directory, stems, servers)
        paths = [chain[-1] for chain in every]
        with shard_files.translate_file_errors("read", directory):
            for key, stored, slots in tables:
                shard = self._shards[key]
                if isinstance(shard, DynamicShard):
                    place = self._server, self._servers, self.note_progress
                    dynamic_files.load(shard.store, every, stored, slots, *place)
                    continue
                shape = shard.spec["rows"], shard.dim
                for name, variable in _variables(shard, stored, slots).items():
                    shard_files.read_share(
                        variable,
                        paths,
                        name,
                        shape,
                        self._server,
                        self._servers,
                        self.note_progress,
                    )

    def take_up(self, directory: str, stem: str, tables: Sequence[tuple[int, int]]) -> None:
        """Reads how many updates this server's rows have seen; what came later is lost.

        Args:
            stem: How the files' names begin.
            tables: List of pairs: a table's number, and its number in the files.
        """
        path = self._path(directory, stem)
        with shard_files.translate_file_errors("read", directory):
            for key, stored in tables:
                counts = shard_files.read_tensor(path, _counts(stored), tf.int64)
                self._shards[key].take_up(counts)

    def keep(self, directory: str, stems: Sequence[str]) -> None:
        """Deletes the files of tables in a folder, but for those whose names begin so."""
        kept = tuple(f"{stem}-" for stem in stems)
        for path in shard_files.find(directory, f"{STEM}-*-of-*"):
            name = os.path.basename(path)
            if _OWN.fullmatch(name) and not name.startswith(kept):
                shard_files.remove_tree(path)
        for where, stem in list(self._marks):
            if where == directory and stem not in stems:
                del self._marks[where, stem]
        if not stems:
            with contextlib.suppress(OSError):
                os.rmdir(directory)  # On a disk of this server's own, nothing else is in it.

    def _path(self, directory: str, stem: str) -> str:
        return shard_files.path_of(directory, stem, self._server, self._servers)

    def note_progress(self) -> None:
        """Tells who waits that work goes on."""
        self.progress += 1


def _variables(shard: TableShard, key: int, slots: int) -> dict[str, tf.Variable]:
    """Variables of a shard, by their names in files.

    The table has the number `key`.
    """
    variables = {name_of(key): shard.weights}
    variables.update({name_of(key, i): shard.slots[i] for i in range(slots)})
    return variables


def _counts(key: int) -> str:
    return f"{key}/counts"
