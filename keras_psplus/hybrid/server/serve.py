"""The life of a parameter server of `HybridStrategy`: as long as its job's chief."""

import threading
from collections.abc import Iterable
from typing import Any

from keras_psplus.cluster.config import ClusterStartupError, TaskConfig
from keras_psplus.cluster.process import tuning
from keras_psplus.cluster.secret import Secret
from keras_psplus.cluster.serving import serve as cluster_serve
from keras_psplus.cluster.startup.preflight import check_local_address
from keras_psplus.cluster.wire import handshake
from keras_psplus.errors import ChiefLostError, TableServerError
from keras_psplus.hybrid.rpc.control_link import ControlLink
from keras_psplus.hybrid.server.table_server import TableServer

_ANSWER_SECONDS = 20.0


def serve(
    task: TaskConfig,
    secret: Secret,
    options: dict[str, Any],
    agreed: str,
    startup_timeout: float,
    folders: Iterable[str] | None = (),
    chief_gone: float = 5.0,
) -> None:
    """Serves tables until the chief has ended.

    Args:
        task: `TaskConfig` of this ps task.
        secret: `secret.Secret` of the job's token.
        options: Dict of what `Shard` takes beside its table.
        agreed: Text that has to be equal in all processes of the job.
        startup_timeout: Seconds to wait for the chief.
        folders: Paths of the folders below which it may write; None for all.
        chief_gone: Seconds for which the chief cannot be reached before it counts as ended.

    Raises:
        keras_psplus.cluster.ClusterStartupError: If this task's address cannot be used or the
            chief does not come.
        keras_psplus.cluster.serving.serve.ChiefLostError: If the chief has ended without having
            said so, or a worker has been started again.
    """
    check_local_address(task)
    tuning.tune()
    tuning.hide_gpus()
    ended, problem = threading.Event(), []
    server = TableServer(task, secret, options, agreed, cluster_serve.log_line, folders)

    def watch() -> None:
        try:
            _check_that_it_answers(server, task, secret)
            cluster_serve.outlive(
                task,
                lambda: server.was_greeted,
                lambda: server.was_greeted and not server.was_left,
                lambda: False,  # Other workers may not have ended.
                startup_timeout,
                chief_gone,
            )
        except Exception as error:  # Raised again by the main thread.
            problem.append(error)
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    server.serve(ended)
    if problem:
        raise problem[0]
    if server.restarted is not None:
        raise ChiefLostError(
            f"{server.restarted} has been started again, and {task.name} holds tables of the start "
            "before: it ends. Start it again, too; with the BackupAndRestore callback "
            f"training resumes where it was. Received: another process of {server.restarted}"
        )


def _check_that_it_answers(server: TableServer, task: TaskConfig, secret: Secret) -> None:
    """TensorFlow's server says nothing if it cannot listen, or if somebody else does there."""
    server.listens.wait()
    assert task.address is not None
    link = ControlLink(task.name, task.address, secret, timeout=_ANSWER_SECONDS)
    try:
        nonce, said = link.request("who")["nonce"], ""
        if not handshake.grpc_responds(task.address, _ANSWER_SECONDS):
            nonce = None
    except TableServerError as error:
        nonce, said = None, f" ({error})"
    if nonce != server.nonce:
        raise ClusterStartupError(
            f"{task.name} cannot be reached at {task.address}, its own address: another process "
            "uses the port, or the host's name leads elsewhere. "
            f"Received: TF_CONFIG={task.to_tf_config()}{said}"
        )
