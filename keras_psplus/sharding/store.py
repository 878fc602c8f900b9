"""All variables in shares of one strategy, and reads of them that one worker asks for alone."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.topology.levels import launcher_like
from keras_psplus.core.jobs import failure
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.core.jobs.control import ControlPlane
    from keras_psplus.sharding.variable import ShareVariable

_POLL_SECONDS = 3.0
_numbers = itertools.count()


class ShareStore:
    """Variables in shares, by numbers that are the same on all workers.

    A script may save on the chief alone, while the other workers go on or have ended. So a thread
    on each worker waits for requests, which are numbered keys of TensorFlow's coordination service
    (the first that writes a key has the number), and takes part in one gathering for each. What a
    worker gives is of the step that the asking one has done: the next update of all of them waits
    for the asking one's gradients. At its end, a process waits for the ends of the others.

    Args:
        launcher: Collectives of this worker's replica, for steps.
        host: Collectives between the workers' hosts, which the thread's resemble.
        group_key: Group key of the thread's collectives.
        control: The control plane.
        rank: Rank of this worker.
        progress: Function without arguments that returns how many steps this process has done.
    """

    def __init__(
        self,
        launcher: Launcher,
        host: Launcher,
        group_key: int,
        control: ControlPlane,
        rank: int,
        progress: Any,
    ) -> None:
        self.launcher, self.rank, self.workers = launcher, rank, len(control.names)
        self.device: str = launcher._device
        self.restoring = False
        self._control, self._progress = control, progress
        self._host = launcher_like(host, group_key, tuple(range(self.workers)))
        self._prefix = f"keras_psplus/shares/{next(_numbers)}"
        self._variables: list[weakref.ref[ShareVariable]] = []
        self._reading, self._changed = threading.Lock(), threading.Condition()
        # The next request, and the answers to this worker's own.
        self._next = 0
        self._answers: dict[int, Any] = {}
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def add(self, variable: ShareVariable, form: str, name: str) -> int:
        """Registers a variable; returns its number.

        Args:
            variable: The variable.
            form: Its shape and dtype, as text that must be equal on all workers.
            name: Its name, for messages.
        """
        with failure.translate_errors(self._control.task):
            self._control.check_same("variable in shares", form, f"{name} ({form})")
        self._variables.append(weakref.ref(variable))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
            atexit.register(self._leave)
        return len(self._variables) - 1

    @contextlib.contextmanager
    def restores(self) -> Iterator[None]:
        """Context in which the chief reads wholes that the other workers have not read yet."""
        self.restoring = True
        try:
            yield
        finally:
            self.restoring = False
            for variable in filter(None, (reference() for reference in self._variables)):
                variable.restored = None

    def read(self, variable: ShareVariable) -> tf.Tensor:
        """The whole value of a variable; the other workers need not ask for it."""
        request = {"by": self.rank, "variable": variable.number, "steps": self._progress()}
        with failure.translate_errors(self._control.task), self._reading:
            while True:
                with self._changed:
                    number = self._next
                # Another worker may have been quicker: then it is its number.
                with contextlib.suppress(tf.errors.OpError, ValueError):
                    context.context().set_config_key_value(self._key(number), json.dumps(request))
                with self._changed:
                    while self._next == number and self._error is None:
                        self._changed.wait(_POLL_SECONDS)
                    if number in self._answers:
                        return self._answers.pop(number)
                    if self._error is not None:
                        raise self._error

    def _key(self, name):
        return f"{self._prefix}/{name}"

    def _serve(self):
        try:
            while True:
                try:
                    wait = int(_POLL_SECONDS * 1000)
                    text = context.context().get_config_key_value(self._key(self._next), wait)
                except tf.errors.DeadlineExceededError:
                    continue
                self._answer(json.loads(text))
        except Exception as error:  # Raised again by who reads.
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _answer(self, request):
        mine = request["by"] == self.rank
        while self._progress() < request["steps"]:
            # Here, the step is not over that the asking worker has done.
            time.sleep(0.002)
        variable = self._variables[request["variable"]]()
        if variable is None:
            raise RuntimeError(
                "A variable in shares that another worker reads is gone here: every worker must "
                f"keep the same models and optimizers. Received: variable {request['variable']}"
            )
        with tf.device(self._host._device):
            value = variable.gathered(self._host)
        with self._changed:
            if mine:
                self._answers[self._next] = value
            self._next += 1
            self._changed.notify_all()
        if mine:
            # All have read it: they have taken part.
            context.context().delete_config_key_value(self._key(self._next - 1))

    def _leave(self):
        """Waits until no worker can ask any more."""
        if failure.has_failed() or self._error is not None or hasattr(sys, "last_value"):
            return
        others = [f"end/{name}" for name in self._control.names]
        try:
            mine = self._key(f"end/{self._control.names[self.rank]}")
            context.context().set_config_key_value(mine, "")
            says = True
            for other in others:
                start = time.monotonic()
                while True:
                    try:
                        context.context().get_config_key_value(
                            self._key(other), int(_POLL_SECONDS * 1000)
                        )
                        break
                    except tf.errors.DeadlineExceededError:
                        if failure.has_failed() or self._error is not None:
                            return
                        if says and time.monotonic() - start > 2 * _POLL_SECONDS:
                            says = False
                            logger.info(
                                "%s has ended, and stays until %s ends: that may save parts of "
                                "the optimizer that are here",
                                self._control.names[self.rank],
                                other.partition("/")[2],
                            )
        except (tf.errors.OpError, ValueError):
            return  # The chief, which has the keys, has ended.
