"""Names variables that a script sets too late, where TensorFlow was imported before it began."""

import os
import pathlib
import sys

from keras_psplus.log import logger

# The first is each task's own; the second only decides what TensorFlow says of itself.
_NEVER_LATE = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")


def warn() -> None:
    """Warns of variables of TensorFlow that this process's script has set, if it started warm."""
    if sys.platform != "linux" or not _is_warm():
        return
    # As the process that this one is a fork of was started.
    lines = pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")
    before = dict(os.fsdecode(line).partition("=")[::2] for line in lines if line)
    names = {n for n in {*before, *os.environ} if n.startswith("TF_") and n not in _NEVER_LATE}
    late = sorted(name for name in names if before.get(name) != os.environ.get(name))
    if late:
        logger.warning(
            "%s: set or changed by the script, after TensorFlow was imported for it (`--warm`). "
            "What TensorFlow reads then has to be set before the launcher is started. "
            "Received: %s",
            ", ".join(late),
            ", ".join(f"{name}={os.environ.get(name)}" for name in late),
        )


def _is_warm():
    arguments = pathlib.Path("/proc/self/cmdline").read_bytes().split(b"\0")
    return any(one.endswith(b"/warm_server.py") for one in arguments[:2])
