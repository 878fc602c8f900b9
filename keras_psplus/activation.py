"""Activation: what begins with a process's first strategy or scope, not at import.

The library's lines are shown, and what it replaces in Keras, TensorFlow and Python is replaced.
`import keras_psplus` alone leaves a process as it is.
"""

import threading
from collections.abc import Callable

from keras_psplus import log

_steps: list[Callable[[], None]] = []
_lock = threading.RLock()


def at_activation(step: Callable[[], None]) -> None:
    """Registers a function for the first strategy or scope, which it runs before."""
    _steps.append(step)


def activate() -> None:
    """Begins, if that has not been done: called by strategies, scopes and other entrances."""
    log.show()
    with _lock:
        while _steps:
            _steps[0]()
            # A step that fails, as hooks that do not fit, fails for the next strategy too.
            del _steps[0]
