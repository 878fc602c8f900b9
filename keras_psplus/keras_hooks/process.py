"""The process: how it is about to end."""

import sys
from typing import Any

from keras_psplus.cluster.process.exit_code import EXITS
from keras_psplus.keras_hooks.hook import Hook


def _if_watched(_: Any) -> object | None:
    return EXITS if EXITS.is_watching else None


HOOKS = (
    Hook(
        sys,
        "exit",
        ["status"],
        _if_watched,
        "note",
        "servers learn whether the script has ended well, which functions of atexit are not told",
    ),
)
