"""Signal handlers of the processes that a task forks."""

import functools
import os
import signal


@functools.cache
def end_by_sigterm() -> None:
    """Has processes forked from now on treat SIGTERM as they would without a cluster.

    TensorFlow's coordination service installs a handler in C that notes SIGTERM and goes on. Forked
    processes inherit it without the thread that reads the note: `terminate()` would not end them,
    and a `join` of them (by a pool of Keras's `PyDataset`, or the script's) would never return.
    """
    os.register_at_fork(after_in_child=_restore)


def _restore() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:  # as the process that started Python has set it
        signal.signal(signal.SIGTERM, handler)
