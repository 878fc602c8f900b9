"""The module `grpc`, imported when the first channel is made.

It is another copy of gRPC than TensorFlow's own, in the same process. A process that has forked
(`process/warm.py`) has not imported it.
"""

import functools
import os
import threading
from types import ModuleType
from typing import Any

# Read once, by gRPC's core. It would say on stderr what is said in errors here, and would look
# after channels at each fork of the process: none of ours is used across one.
_AT_IMPORT = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
_lock = threading.Lock()


def load() -> Any:
    """Imports `grpc`; the environment stays as it is.

    Raises:
        RuntimeError: In a fork of a process that has used it, whose threads are not here: it would
            wait for them without end.
    """
    with _lock:  # Two threads at once would take each other's environment for the user's.
        module, pid = _load()
    if pid != os.getpid():
        raise RuntimeError(
            f"Process {os.getpid()} is a fork of one that has joined a cluster, and cannot join "
            "another. Fork before the strategy is made, or start a new process (`spawn`). "
            f"Received: a fork of process {pid}"
        )
    return module


@functools.cache
def _load() -> tuple[ModuleType, int]:
    added = {name: value for name, value in _AT_IMPORT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        import grpc
    finally:
        for name in added:
            del os.environ[name]
    return grpc, os.getpid()
