"""Leases of serving tasks: a server belongs to the first chief that claims it.

TensorFlow's servers accept requests from anybody, and two chiefs with the same servers wait for
each other without end. So a chief claims its servers before it connects to them, by their control
channels. A claim ends with its chief.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel import tls
from keras_psplus.cluster.channel.sessions import Authenticator, RefusedError, Secret, Session
from keras_psplus.cluster.channel.transport import ChannelClient, ChannelError, ChannelServer
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig, split_address
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.handshake import PeerIdentity
from keras_psplus.cluster.ports import control_address, port_holder
from keras_psplus.log import warn_once
from keras_psplus.process_identity import own_id

# The control channel of a task that serves TensorFlow, on a port of its own.


_CONNECT_SECONDS, _ANSWER_SECONDS = 2.0, 15.0


def listen(
    config: TaskConfig, gate: Authenticator, answer: Callable[[str, str], str], host: str = "[::]"
) -> ChannelServer:
    """Answers who knows the job's token, on the port of the task's control channel.

    Args:
        answer: As `handle` of `ChannelServer`.
        host: Host to listen on; all interfaces by default, as TensorFlow's server does.

    Raises:
        ClusterStartupError: If the port is taken.
    """
    assert config.address is not None
    _, port = split_address(control_address(config.address))
    try:
        return ChannelServer(f"{host}:{port}", gate, answer)
    except OSError:
        raise ClusterStartupError(
            f"{config.name} cannot listen on port {port} for the control channel, which belongs to "
            f"its address {config.address}: {port_holder(port) or 'another process'} uses it. End "
            f"that, or give {config.name} another port. "
            f"Received: TF_CONFIG={config.to_tf_config()}"
        ) from None


def listen_to_chief(
    config: TaskConfig, functions: Mapping[str, Callable[..., Any]]
) -> ChannelServer:
    """Has functions called by a chief, by their names; their types are those of JSON.

    Raises:
        ClusterStartupError: If the port is taken.
    """
    gate = Authenticator(
        _secret(),
        f"{config.name} belongs to another job: its token differs. Start all tasks with the same "
        f"{TOKEN_VARIABLE}, or all without. Received: another token",
    )

    def answer(body: str, host: str) -> str:
        what, arguments = json.loads(body)
        return json.dumps(functions[what](**arguments))

    return listen(config, gate, answer)


def ask(task: str, what: str, arguments: dict[str, Any], timeout: float = _ANSWER_SECONDS) -> Any:
    """Calls a function of a task that serves.

    Args:
        task: The task's own address, `host:port`.
        timeout: Seconds that an answer may take.

    Raises:
        RefusedError: If the task has another token.
        ConnectionError: If nothing of this library answers there.
        TimeoutError: If the port cannot be reached, as behind a firewall.
        OSError: If the two disagree on TLS.
    """
    address, own_tls = control_address(task), tls.Tls.from_env()
    try:
        handshake.connect(address, _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        raise
    except OSError as error:
        raise TimeoutError(f"{error}") from None
    with ChannelClient(address, own_tls) as client:
        session = Session(_secret(), lambda text: client.send(text, timeout))
        try:
            return json.loads(session.ask(json.dumps([what, arguments])))
        except ChannelError as error:
            handshake.explain_tls(address, own_tls, str(error))
            raise ConnectionError(f"{error}") from None


def _secret() -> Secret:
    # Without a token the first chief that comes has the servers all the same.
    return Secret(os.environ.get(TOKEN_VARIABLE) or "")


# From a claim until the chief's own server must accept connections.
_START_SECONDS = 30.0


class LeaseHolder:
    """Notes, in a task that serves, which chief it belongs to.

    Args:
        leader: Address of the chief that it expects.
    """

    def __init__(self, leader: str) -> None:
        self._leader = leader
        self._holder: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def claim(self, who: str, host: str, process: str, address: str | None) -> str | None:
        """Gives this task to a chief, unless another one has it.

        Args:
            who: Words that name the chief.
            host: The host on which it runs.
            process: What tells its process from others.
            address: Its own address, or None if it says none.

        Returns:
            None, or words that name the one that has it.
        """
        own = {"who": who, "host": host, "process": process, "address": address}
        with self._lock:
            holder = self._holder
            if holder is None or process == holder["process"] or self._is_free(own, holder):
                self._holder = {**own, "since": time.monotonic()}
                return None
            since = time.monotonic() - holder["since"]
            return f"{holder['who']}, which has claimed it {since:.0f} s ago"

    def _is_free(self, own: dict[str, Any], holder: dict[str, Any]) -> bool:
        if own["address"] and all(own[key] == holder[key] for key in ("address", "host")):
            return True  # Two processes cannot have the port: the other one has ended.
        is_starting = time.monotonic() < holder["since"] + _START_SECONDS
        return not is_starting and not handshake.listens(holder["address"] or self._leader)


class ServerLease:
    """A chief's side of `LeaseHolder`.

    Args:
        cluster: Dict from job names to lists of addresses.
        config: `TaskConfig` of the chief, or None if it has none.

    Attributes:
        servers: Dict from the servers' names to their addresses.
    """

    def __init__(
        self, cluster: Mapping[str, Sequence[str]], config: TaskConfig | None = None
    ) -> None:
        # A server that two jobs share by mistake is a ps more often than a worker.
        self.servers = {
            f"{job}-{index}": address
            for job in ("ps", "worker")
            for index, address in enumerate(cluster.get(job, ()))
        }
        self._config = config
        me = PeerIdentity.of(config) if config else PeerIdentity.of_chief()
        own = {"process": own_id(), "address": config.address if config else None}
        self._own = {"who": me.who, "host": me.host, **own}

    def claim_all(self, but: Collection[str] = ()) -> None:
        """Claims all servers.

        Args:
            but: Names of those that are not there yet.

        Raises:
            ClusterStartupError: If one belongs to another chief, or to a job with another token.
        """
        first, *others = [name for name in self.servers if name not in but]
        self.claim(first)
        with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(self.claim, others))

    def claim(self, name: str) -> bool:
        """Claims one server; returns False if it knows nothing of claims, or cannot be asked."""
        address = self.servers[name]
        received = f"TF_CONFIG={self._config.to_tf_config()}" if self._config else address
        try:
            holder = ask(address, "claim", self._own)
        except RefusedError as error:
            raise ClusterStartupError(f"{name} ({address}): {error}. {received}") from None
        except ConnectionError:
            return False  # TensorFlow's own server.
        except TimeoutError as error:
            # Once: a worker that comes is asked again and again.
            warn_once(
                "%s cannot be reached on its control channel, %s, and can neither refuse another "
                "chief nor tell this one's failure from its end. Open that port. Received: %s",
                *(name, control_address(address), error),
            )
            return False
        except OSError as error:
            raise ClusterStartupError(
                f"{name} cannot be claimed at {control_address(address)}, the address of its "
                f"control channel: {error}. Received: {received}"
            ) from None
        if holder is not None:
            raise ClusterStartupError(
                f"{name} ({address}) serves another chief: {holder}. {self._own['who']} cannot use "
                "the same parameter servers and workers: end that job first, or give this one "
                f"other servers. Received: {received}"
            )
        return True
