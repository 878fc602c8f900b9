"""The control channel of a task that serves TensorFlow, on a port of its own."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from keras_psplus.cluster.channel import tls
from keras_psplus.cluster.channel.client import ChannelClient, ChannelError
from keras_psplus.cluster.channel.server import ChannelServer
from keras_psplus.cluster.channel.sessions import Authenticator, Session
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig, split_address
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.ports import control_address, port_holder
from keras_psplus.cluster.secret import Secret
from keras_psplus.cluster.wire import handshake

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
