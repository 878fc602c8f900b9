"""Tables of backups, written and read by the parameter servers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.cluster.channel import ConnectionWatch
from keras_psplus.cluster.ports import control_address
from keras_psplus.core.backup.backup_tables import BackupTables, with_slots
from keras_psplus.core.base.optimizers import by_place
from keras_psplus.errors import PeerLostError, TableServerError, TableServerLostError
from keras_psplus.files.tables import LATEST
from keras_psplus.hybrid import saving
from keras_psplus.hybrid.servers import ControlLink, Servers
from keras_psplus.hybrid.tables.embeddings import TableVariable
from keras_psplus.hybrid.tables.placement import Tables
from keras_psplus.log import logger


class ServerTables(BackupTables):
    """Tables of one job's backups; methods that write and read are for the chief.

    Attributes:
        lock: Held while servers write tables, or read them.
        latest: Folder of the last state that this job has written, the content of its list, and its
            place in the training; None before the first.
    """

    def __init__(self, servers: Servers, tables: Tables, is_sync: bool) -> None:
        self._servers, self._tables, self._is_sync = servers, tables, is_sync
        self.lock = threading.Lock()
        self.latest: tuple[str, dict[str, Any], str] | None = None

    def is_on_servers(self, variable: Any) -> bool:
        return isinstance(getattr(variable, "_value", None), TableVariable)

    def any_of(self, model: keras.Model) -> bool:
        return bool(self._places(model))

    def parts_on_servers(self, model: keras.Model) -> list[Any]:
        return list(filter(self.is_on_servers, with_slots(model)))

    def slots_of(self, variable: Any, model: keras.Model) -> list[Any]:
        if not self.is_on_servers(variable):
            return super().slots_of(variable, model)
        table = variable._value.table
        parts = self.parts_on_servers(model)
        return [v for v in parts if v._value.table is table and v._value.slot]

    def check_writable(self, model: keras.Model, folder: str) -> None:
        if self.any_of(model):
            with self._lost_for_all():
                self._servers.ask_all("check_directory", directory=folder)

    def begin_write(self, model: keras.Model, folder: str) -> dict[str, Any] | None:
        places = self._places(model)
        with self._away(), self.lock:
            is_here = self.latest is not None and self.latest[0] == folder
            chain = self.latest[1]["chain"] if is_here and self.latest is not None else []
            content = saving.begin(self._servers, self._tables.all, folder, chain)
            for entry in content["tables"]:
                entry["place"] = places.get(entry["key"])
            return content
        return None

    def finish_write(
        self, folder: str, content: dict[str, Any], stems: Sequence[str] | None
    ) -> dict[str, Any] | None:
        with self._away():
            if stems is not None:
                kept = [*stems, content["stem"]]
                self._servers.ask_all("keep", directory=folder, stems=kept)
            return saving.finish(self._servers, folder, content, stems)
        return None

    def note_written(self, folder: str, content: dict[str, Any], at: str) -> None:
        with self.lock:
            self.latest = folder, content, at

    def read(
        self, model: keras.Model, folder: str, content: dict[str, Any], is_strict: bool
    ) -> str | None:
        keys = {place: key for key, place in self._places(model).items()}
        pairs = [
            (self._tables.all[keys[entry["place"]]], entry)
            for entry in content["tables"]
            if entry["place"] in keys
        ]
        request = saving.request_of(pairs, folder, content, is_strict)
        try:
            with self._lost_for_all(), self.lock:
                self._servers.ask_all("load", **request)
        except TableServerLostError:
            raise
        except TableServerError as error:
            return f"{error}"
        return None

    def note_ended(self, folder: str, is_kept: bool) -> None:
        if is_kept:
            self._servers.at_good_end(lambda: self._delete_unlisted(folder))
            return
        with self.lock:
            if self.latest is not None and self.latest[0] == folder:
                self.latest = None
            self._delete(folder)

    def recovery_request(self, folder: str, content: dict[str, Any]) -> dict[str, Any]:
        """Request to a server that was started again to read its rows."""
        stored = {entry["key"]: entry for entry in content["tables"]}
        lacking = [table.name for table in self._tables.all if table.key not in stored]
        if lacking:
            raise ValueError(f"The last backup is older than some tables. Received: {lacking}")
        pairs = [(table, stored[table.key]) for table in self._tables.all]
        return saving.request_of(pairs, folder, content, is_strict=False)

    def _delete(self, folder: str) -> None:
        with contextlib.suppress(TableServerError):
            self._servers.ask_all("keep", directory=folder, stems=[])

    def _delete_unlisted(self, folder: str) -> None:
        # Another `fit` may have left its state there.
        if not tf.io.gfile.exists(os.path.join(folder, LATEST)):
            self._delete(folder)

    def _places(self, model: keras.Model) -> dict[int, str]:
        """Places of a model's tables in it, by the tables' numbers."""
        return {
            variable._value.table.key: place
            for place, variable in by_place(model).items()
            if self.is_on_servers(variable) and not variable._value.slot
        }

    @contextlib.contextmanager
    def _away(self) -> Iterator[None]:
        """Context that a server which is lost, and will be back, ends."""
        try:
            with self._lost_for_all():
                yield
        except TableServerLostError as error:
            logger.warning("there is no backup of this step: %s", error)

    @contextlib.contextmanager
    def _lost_for_all(self) -> Iterator[None]:
        """Context in which a lost server ends a synchronous job."""
        try:
            yield
        except TableServerLostError as error:
            if not self._is_sync:
                raise
            raise PeerLostError(f"{error}") from None


# With `sync=False` only: the workers repeat the calls that failed, and continue with rows that lack
# the last updates. A synchronous job cannot continue. A server's control channel is connected once
# more when it has been started again, or was cut off.


_POLL_SECONDS = 0.5


class Recovery:
    """Watches over all servers, in threads of the chief.

    Args:
        timeout: Seconds to wait for pushes that tell how much was lost.
    """

    def __init__(self, servers: Servers, tables: ServerTables, timeout: float) -> None:
        self._servers, self._tables, self._timeout = servers, tables, timeout

    def start(self) -> None:
        for index in range(len(self._servers)):
            threading.Thread(target=self._watch, args=(index,), daemon=True).start()

    def _watch(self, index: int) -> None:
        (name, address), made = self._servers.peers[index], 0
        connections = ConnectionWatch({name: control_address(address)}, self._timeout)
        while True:
            made = connections.wait_for_connection(name, made)
            try:
                link = self._servers.find_restarted(index)
                if link is not None:
                    self._recover(index, link, name, address)
            except (TableServerError, ValueError, OSError) as error:
                logger.error("%s (%s) does not take its place again: %s", name, address, error)

    def _recover(self, index: int, link: ControlLink, name: str, address: str) -> None:
        with self._tables.lock:
            latest = self._tables.latest
            if latest is None:
                raise ValueError(
                    "There is no backup yet: give `fit` keras.callbacks.BackupAndRestore. "
                    "Received: none"
                )
            folder, content, at = latest
            self._servers.recover(index, link, self._tables.recovery_request(folder, content))
        deadline = time.monotonic() + self._timeout
        lost = link.request("lost")["lost"]
        while not all(heard for _, heard in lost.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            lost = link.request("lost")["lost"]
        logger.warning(
            "%s (%s) was started again, and goes on with its rows of the tables as they were "
            "%s. What workers had sent to it since is lost: %s",
            name,
            address,
            at,
            ", ".join(f"{count} updates of {table}" for table, (count, _) in lost.items()),
        )
