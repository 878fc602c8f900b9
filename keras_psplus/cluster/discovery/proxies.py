"""Proxies of the environment, through which gRPC would send what tasks send each other.

gRPC reads the variables when it connects: `grpc_proxy`, `https_proxy` or `http_proxy`, and the
hosts without one from `no_grpc_proxy`, or else from `no_proxy`. (The handshake before TensorFlow
starts uses none, so that the cluster would seem to be well.)
"""

import os
from collections.abc import Iterable, MutableMapping

from keras_psplus import text_table
from keras_psplus.cluster.config import TaskConfig, split_address
from keras_psplus.log import info_once

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
_MOST_SHOWN = 4


def proxy_of(environ: MutableMapping[str, str] | None = None) -> str | None:
    """Returns the name of the variable whose proxy gRPC uses; None if there is none."""
    environ = os.environ if environ is None else environ
    return next((name for name in _PROXIES if environ.get(name)), None)


def bypass(task: TaskConfig, environ: MutableMapping[str, str] | None = None) -> None:
    """Has the tasks of a cluster talk to each other without a proxy.

    Other libraries read `no_proxy`, which stays as it is.

    Args:
        environ: The environment; `os.environ` by default.

    Example:

    ```python
    environ = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost"}
    bypass(TaskConfig({"worker": ("h1:2222", "h2:2222")}, "worker", 0), environ)
    environ["no_grpc_proxy"]  # "localhost,h1,h2"
    ```
    """
    environ = os.environ if environ is None else environ
    proxy = proxy_of(environ)
    if proxy is None:
        return
    # If the first of them is set, the second does not count.
    given = next((environ[name] for name in _EXCEPTIONS if environ.get(name)), "")
    excepted = [entry.strip() for entry in given.split(",") if entry.strip()]
    hosts = dict.fromkeys(split_address(address)[0] for _, _, address in task.tasks())
    missing = [host for host in hosts if not _is_excepted(host, excepted)]
    if not missing:
        return
    environ["no_grpc_proxy"] = ",".join([*excepted, *missing])
    if task.is_chief:
        info_once(
            "%s is set: tasks talk to each other without it (no_grpc_proxy has %s now)",
            proxy,
            text_table.listed(missing, _MOST_SHOWN),
        )


def _is_excepted(host: str, entries: Iterable[str]) -> bool:
    """Whether a host ends with one of the entries, compared as in gRPC."""
    return any(host.lower().endswith(entry.lower()) for entry in entries)
