"""The end of a worker whose script is done.

Texts that workers exchange lie in the first worker (`control.py`). Once it has them all its script
may end, while a worker behind a slow link is still reading them.

1. Each worker whose script has ended posts that it leaves.
2. The first worker stays until all have posted it or are gone, for some seconds at most.
3. It ends after their processes have. A thread of theirs that waits for a text would learn of its
   end while the interpreter ends, which a thread in TensorFlow's code does not survive.
"""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Collection

import tensorflow as tf

from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.handshake import GONE, places_of, state_of
from keras_psplus.cluster.process import signals
from keras_psplus.core.jobs import failure
from keras_psplus.tf_internals import context

_POLL_SECONDS = 1.0
# The first worker may hang, or another work on alone for as long as it likes.
_POST_SECONDS, _STAY_SECONDS = 3.0, 30.0
# An interpreter ends within a second; those of large processes, on a busy machine, do not.
_END_SECONDS, _LOOK_SECONDS = 15.0, 0.05


def watch(task: TaskConfig, silent: Callable[[], Collection[str]]) -> None:
    """Has this worker leave in order when its script ends well."""
    has_ended = threading.Event()
    # At the interpreter's end no thread can be started any more.
    thread = threading.Thread(target=_run, args=[task, silent, has_ended], daemon=True)
    thread.start()

    def leave() -> None:
        if not signals.is_bad() and not failure.has_failed():
            has_ended.set()
            thread.join(_STAY_SECONDS if task.is_chief else _POST_SECONDS)

    atexit.register(leave)


def post(name: str) -> None:
    """Posts that a worker's script has ended."""
    context.context().set_config_key_value(_key(name), "")


def has_left(name: str, seconds: float) -> bool:
    """Whether a worker has posted that it leaves, or does within some seconds."""
    try:
        context.context().get_config_key_value(_key(name), int(1000 * seconds))
    except tf.errors.DeadlineExceededError:
        return False
    return True


def _run(
    task: TaskConfig, silent: Callable[[], Collection[str]], has_ended: threading.Event
) -> None:
    has_ended.wait()
    deadline = time.monotonic() + _STAY_SECONDS
    # The store is that of a worker that may be gone, or this one's, after which it is closed.
    with contextlib.suppress(tf.errors.OpError, ValueError):
        if not task.is_chief:
            post(task.name)
            return
        peers = {
            task_name(job, index): places_of(address)
            for job, index, address in task.peers(("chief", "worker"))
        }
        for name, places in peers.items():
            while time.monotonic() < deadline and name not in silent():
                if has_left(name, _POLL_SECONDS) or state_of(places, _POLL_SECONDS) == GONE:
                    break
        deadline = min(deadline, time.monotonic() + _END_SECONDS)
        for places in peers.values():
            while time.monotonic() < deadline and state_of(places, _POLL_SECONDS) != GONE:
                time.sleep(_LOOK_SECONDS)


def _key(name: str) -> str:
    return f"keras_psplus/left/{name}"
