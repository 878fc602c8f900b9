"""Restores a restarted parameter server from the last backup.

With `sync=False` only: the workers repeat the calls that failed, and continue with rows that lack
the last updates. A synchronous job cannot continue. A server's control channel is connected once
more when it has been started again, or was cut off.
"""

import threading
import time
from typing import Any

from keras_psplus.cluster.channel.transport import ConnectionWatch
from keras_psplus.cluster.ports import control_address
from keras_psplus.errors import TableServerError
from keras_psplus.hybrid.files.server_tables import ServerTables
from keras_psplus.hybrid.rpc.servers import ControlLink, Servers
from keras_psplus.log import logger

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
            (folder, *others), content, at = latest
            try:
                self._read(index, link, folder, content)
            except TableServerError:
                if not others:
                    raise
                self._read(index, link, others[0], content)
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

    def _read(self, index: int, link: ControlLink, folder: str, content: dict[str, Any]) -> None:
        self._servers.recover(index, link, self._tables.recovery_request(folder, content))
