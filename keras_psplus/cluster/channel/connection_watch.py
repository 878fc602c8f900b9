"""Connections to tasks' control channels that gRPC's keepalive watches.

gRPC's threads answer a ping whatever the process computes. A connection breaks at once when a
process is killed, and within two pings when it is stopped or cut off; gRPC then connects again by
itself, as soon as something answers there.
"""

import collections
import functools
import threading
import time
from collections.abc import Mapping

from keras_psplus.cluster.channel.client import ChannelClient
from keras_psplus.cluster.channel.server import LEAST_PING_SECONDS
from keras_psplus.cluster.channel.tls import Tls

_PING_SECONDS = 2.0


class ConnectionWatch:
    """Notes since when which connections are broken.

    What has never been reached counts as nothing: a firewall may close the channel's port.

    Args:
        addresses: Dict from tasks' names to addresses of their control channels.
        timeout: Seconds that a silence may last, within which it has to be noted.
    """

    def __init__(self, addresses: Mapping[str, str], timeout: float) -> None:
        ping = max(LEAST_PING_SECONDS, min(_PING_SECONDS, timeout / 4))
        # Until the ping that was not answered, and for the answer.
        self._unnoticed = min(2 * ping, timeout / 2)
        self._changed = threading.Condition()
        self._made: collections.Counter[str] = collections.Counter()
        self._broken: dict[str, float] = {}
        tls = Tls.from_env()
        self._clients = {name: ChannelClient(a, tls, ping) for name, a in addresses.items()}
        for name, client in self._clients.items():
            client.watch(functools.partial(self._note, name))

    def silences(self) -> dict[str, float]:
        """Seconds for which tasks may have been silent whose connections are broken, by names."""
        now = time.monotonic()
        with self._changed:
            return {name: now - since + self._unnoticed for name, since in self._broken.items()}

    def wait_for_connection(self, name: str, made: int) -> int:
        """Waits until a task has been connected more often; returns how often it has.

        Args:
            made: How often it had been, as far as is known; 0 at first.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._made[name] > made)
            return self._made[name]

    def close(self) -> None:
        """Ends the connections."""
        for client in self._clients.values():
            client.close()

    def _note(self, name: str, is_connected: bool) -> None:
        with self._changed:
            if is_connected:
                self._made[name] += 1
                self._broken.pop(name, None)
            elif self._made[name]:
                self._broken.setdefault(name, time.monotonic())
            self._changed.notify_all()
