"""Preemption: a process that is told to end by SIGTERM saves the job first.

Schedulers send SIGTERM before they take a machine away: Slurm's preemption and time limits, the
eviction of a pod, a spot machine's end. `fit` with a BackupAndRestore then
saves and ends the process, so that the job resumes at that very step; without one, it ends at once.

Workers that train together have to save after the same batch. Say that worker 1 is told so in its
batch s, and no worker takes more than n steps without the others (n is 1 but for `updates=`):

    worker 1   batch s | posts "save after batch s + n" . . waits . . | batches to s + n | saves
    worker 0   batch s |   batch s + 1 waits for worker 1 | confirms  |  ... to s + n    | saves

Nobody can be done with batch s + n before worker 1 has begun with batch s + 1, which it does when
all have confirmed. A thread of each worker waits for the post: while steps go on, nothing is sent.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import tensorflow as tf

from keras_psplus.cluster.process.signals import EXIT_CODE, SIGNAL
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.backup.fit_progress import FitProgress
    from keras_psplus.core.jobs.control import ControlPlane

_SERVER_SECONDS = 0.5
_POST, _WHAT = "preempted", "saving before the end"
_SAVED = (
    "%s was told to end (SIGTERM) and has saved the job %s, where it resumes when it is started "
    "again. Received: exit code %d"
)
_NOT_SAVED = (
    "{} was told to end (SIGTERM) and ends with nothing saved: give `fit` the callback "
    "keras.callbacks.BackupAndRestore(FOLDER), by which a job is saved and resumes. "
    "Received: exit code {}"
)


class Preemption:
    """End of one process's training by SIGTERM, after the same batch on all workers.

    Args:
        alone: How many steps a worker may take without waiting for another.
    """

    def __init__(self, control: ControlPlane | None, name: str, alone: int = 1) -> None:
        self._control, self._name, self._alone = control, name, alone
        # Whether a process that serves this one is told to end.
        self._is_server_told = False
        self._batches = 0
        self._thread: threading.Thread | None = None
        self._server_thread: threading.Thread | None = None
        self._until: int | None = None

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy, control: ControlPlane | None) -> Preemption:
        task, updates = strategy.task, strategy.updates
        alone = 1 if updates is None else getattr(updates, "every", updates.steps)
        return cls(control, "this process" if task is None else task.name, alone)

    def watch(
        self, progress: FitProgress, are_servers_told: Callable[[], bool] | None = None
    ) -> None:
        """Notes SIGTERM in a `fit`, or ends by it if nothing can be saved.

        Args:
            are_servers_told: Function that asks whether a process that serves this one has got
                SIGTERM; a thread calls it now and then.
        """
        if not progress.is_under_way:
            return
        SIGNAL.watch(self._at_once(progress))
        if not progress.can_save:
            return
        if are_servers_told is not None and self._server_thread is None:
            self._server_thread = threading.Thread(
                target=self._watch, args=(are_servers_told,), daemon=True
            )
            self._server_thread.start()
        if self._control is not None and self._thread is None:
            args = (self._control,)
            self._thread = threading.Thread(target=self._listen, args=args, daemon=True)
            self._thread.start()

    def _watch(self, are_servers_told: Callable[[], bool]) -> None:
        while not are_servers_told():
            time.sleep(_SERVER_SECONDS)
        self._is_server_told = True

    def unwatch(self, outer: FitProgress) -> None:
        """Has SIGTERM end this process again after a `fit`, unless there is one around it."""
        if outer.is_under_way:
            SIGNAL.at_once = self._at_once(outer)
        else:
            SIGNAL.ignore()

    def _at_once(self, progress: FitProgress) -> str | None:
        return None if progress.can_save else _NOT_SAVED.format(self._name, EXIT_CODE)

    def check(
        self,
        progress: FitProgress,
        callbacks: keras.callbacks.CallbackList,
        save: Callable[[], None],
    ) -> None:
        """Saves the job after a batch, and ends this process, if one has got SIGTERM.

        Args:
            callbacks: Its callbacks, which have heard of the end of the batch.
        """
        is_told = SIGNAL.is_noted or self._is_server_told
        if progress.can_save and self.end_batch(_is_last(progress, callbacks), is_told):
            save()
            self.end(progress.at)

    def _listen(self, control: ControlPlane) -> None:
        # When the job is about to end, there is nothing to wait for.
        with contextlib.suppress(tf.errors.OpError, ValueError):
            self._take(control, control.listen(_POST))

    def _take(self, control: ControlPlane, text: str) -> int:
        """Notes the batch that a worker has posted, and confirms it; returns it."""
        self._until = until = int(text)
        control.post(_confirmation(self._name), "")
        return until

    def end_batch(self, is_last: bool, is_told: bool) -> bool:
        """Counts a batch; returns whether all workers save after it, and end.

        Args:
            is_last: Whether `fit` ends with this batch, so that there is nothing to save for.
        """
        self._batches += 1
        if is_told and self._until is None and not is_last:
            self._until = self._batches if self._control is None else self._agree(self._control)
        return self._until is not None and self._batches >= self._until

    def _agree(self, control: ControlPlane) -> int:
        until = self._batches + self._alone
        if not control.post(_POST, str(until)):
            # Another one was told before.
            return self._take(control, control.wait_for(_POST, "another", _WHAT))
        logger.info(
            "%s is told to end (SIGTERM); all workers save after its batch %d", self._name, until
        )
        for name in control.names:
            if name != self._name:
                control.wait_for(_confirmation(name), name, _WHAT)
        return until

    def end(self, where: str) -> NoReturn:
        """Ends this process, as the job is saved."""
        if self._control is not None:
            # The chief has written everything, and nobody's end is another one's failure.
            self._control.exchange(_WHAT, "")
        SIGNAL.is_in_order = True
        logger.warning(_SAVED, self._name, where, EXIT_CODE)
        sys.exit(EXIT_CODE)


def _confirmation(name: str) -> str:
    return f"{_POST}/{name}"


def _is_last(progress: FitProgress, callbacks: keras.callbacks.CallbackList) -> bool:
    """Whether `fit` is known to end with the batch that has ended."""
    place = progress.epoch + 1, progress.batch
    end = callbacks.params.get("epochs"), callbacks.params.get("steps")
    return callbacks.model.stop_training or place == end
