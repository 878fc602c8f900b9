"""Files of a parameter server: writes and reads its rows of the tables."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.files import shard_files
from keras_psplus.files.table_files import STEM, name_of
from keras_psplus.hybrid.server.dynamic_shard import DynamicShard
from keras_psplus.hybrid.server.shard import TableShard
from keras_psplus.tables import files as dynamic_files

# What this module and TensorFlow's operations for it write.
_OWN = re.compile(
    rf"{STEM}-[0-9a-f]+-\d+-of-\d+\.(parts|index(\.tempstate\d+)?|data-\d+-of-\d+(\.tempstate\d+)?)"
)


class ServerFiles:
    """The files of one parameter server.

    Args:
        shards: Dict from tables' numbers to `TableShard`s, as the server fills it.
        options: Dict with `server`, its index, and `servers`, their number.
    """

    def __init__(self, shards: dict[int, TableShard], options: dict[str, Any]) -> None:
        self._shards = shards
        self._server, self._servers = options["server"], options["servers"]
        # Grows while there is something to wait for.
        self.progress = 0

    def save(self, directory: str, stem: str) -> None:
        """Writes this server's rows of all tables, and their optimizers' variables.

        Raises:
            OSError: If it cannot.
        """
        variables: dict[str, tf.Variable] = {}
        tensors = {"server": tf.constant(self._server)}
        parts: list[Iterator[Any]] = []
        for key, shard in self._shards.items():
            tensors[_counts(key)] = shard.counts()
            if isinstance(shard, DynamicShard):
                parts.append(dynamic_files.parts(shard.store, key))
            else:
                variables.update(_variables(shard, key, len(shard.slots)))
        with shard_files.translate_file_errors("write", directory):
            tf.io.gfile.makedirs(directory)
            every = itertools.chain.from_iterable(parts)
            shard_files.write(self._path(directory, stem), variables, tensors, self._go_on, every)

    def load(
        self, directory: str, stem: str, servers: int, tables: Sequence[Sequence[int]]
    ) -> None:
        """Reads this server's rows of tables.

        Args:
            directory: The folder.
            stem: How the files' names begin.
            servers: How many servers have written them.
            tables: List of triples: a table's number, its number in the files, and how many
                variables of its optimizer to read.

        Raises:
            OSError: If it cannot.
        """
        paths = [shard_files.path_of(directory, stem, i, servers) for i in range(servers)]
        with shard_files.translate_file_errors("read", directory):
            for key, stored, slots in tables:
                shard = self._shards[key]
                if isinstance(shard, DynamicShard):
                    place = self._server, self._servers, self._go_on
                    dynamic_files.load(shard.store, paths, stored, slots, *place)
                    continue
                shape = shard.spec["rows"], shard.dim
                for name, variable in _variables(shard, stored, slots).items():
                    shard_files.read_share(
                        variable, paths, name, shape, self._server, self._servers, self._go_on
                    )

    def take_up(self, directory: str, stem: str, tables: Sequence[tuple[int, int]]) -> None:
        """Reads how many updates this server's rows have seen; what came later is lost.

        Args:
            directory: The folder.
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
        if not stems:
            with contextlib.suppress(OSError):
                os.rmdir(directory)  # On a disk of this server's own, nothing else is in it.

    def _path(self, directory: str, stem: str) -> str:
        return shard_files.path_of(directory, stem, self._server, self._servers)

    def _go_on(self) -> None:
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
