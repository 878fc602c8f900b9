"""Variables in shares of one strategy, and reads by one worker alone."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import Hop, Route
from keras_psplus.cluster.process import signals
from keras_psplus.core.base.threads import ThreadFlag
from keras_psplus.core.jobs import failure, leave
from keras_psplus.core.jobs.control import listen
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.core.jobs.control import ControlPlane


# Requests of workers for variables in shares.
#
# A request is a dict: `by` is the rank of the worker that asks, `variable` the number of what it
# reads, or gives a value if it `gives` one; `steps` and `writes` are how many steps and changes of
# the variable the answer must not be older than.


def is_answered(own: dict[str, Any], rank: int, request: dict[str, Any]) -> bool:
    """Whether an answer to any worker's request is the one that a worker waits for.

    Args:
        own: Its own request, without `by`.
    """
    if "steps" not in own or "gives" in own or "gives" in request:
        return own | {"by": rank} == request
    # Another worker's answer is no older than what this one has to read.
    return own["variable"] == request.get("variable") and all(
        own[count] <= request[count] for count in ("steps", "writes")
    )


def error_of(request: dict[str, Any], name: str) -> RuntimeError:
    """The error of a request that a worker waits for in vain."""
    return RuntimeError(
        "A worker reads a variable in shares that another has not made or used, or is steps "
        "ahead. Every worker must run the same script. Received: variable "
        f"{request.get('variable')} after {request.get('steps')} steps, on {name}"
    )


_POLL_SECONDS, _END_SECONDS = 3.0, 0.1
_SILENT_SECONDS, _PATIENCE_SECONDS = 8.0, 120.0
_numbers = itertools.count()
# The answer to a request that has none yet.
_NOT_YET = object()


class ShareStore:
    """Variables in shares, by numbers that are the same on all workers.

    A script may save on the chief alone, while the other workers go on or have ended. So a thread
    on each worker waits for requests, which are numbered keys of TensorFlow's coordination service
    (the first that writes a key has the number), and takes part in one gathering for each. What a
    worker gives is of the step that the asking one has done: the next update of all of them waits
    for the asking one's gradients. Workers that ask for the same at a time are answered together.
    At its end, a process waits for the ends of the others.

    Args:
        route: Way of rows between the workers that share a variable, for steps.
        host: Collectives between the workers' hosts, which the thread's resemble.
        group_key: The first of the group keys of the thread's collectives: one, and one a worker.
        group: Ranks of the workers that share a variable with this one, in the order of their
            parts; None for all.

    Attributes:
        rank: Place of this worker among those that share a variable.
        workers: Number of those.
        restoring: Whether this worker alone gives values, as a chief that loads does.
        is_together: Whether this thread is at the same reads and changes on all workers.
    """

    def __init__(
        self,
        route: Route,
        host: Launcher,
        group_key: int,
        control: ControlPlane,
        rank: int,
        progress: Progress,
        group: Sequence[int] | None = None,
    ) -> None:
        self._number, self._everyone = rank, tuple(range(len(control.names)))
        group = self._everyone if group is None else tuple(group)
        self.route, self.rank, self.workers = route, group.index(rank), len(group)
        self.device: str = route.last.launcher._device
        self.restoring, self.is_together = False, ThreadFlag()
        self._control, self._progress = control, progress
        self._host = host.like(group_key, self._everyone)
        sharing = host.like(group_key + 1 + min(group), group)
        self._sharing = Route(Hop(sharing, group, self.rank))
        self._prefix = f"keras_psplus/shares/{next(_numbers)}"
        # They are kept until all workers have let go of them: a script that has ended on one worker
        # may save on another.
        self._variables: list[Any] = []
        self._released: list[int] = []
        self._releases: collections.Counter[int] = collections.Counter()
        self._reading, self._changed = threading.Lock(), threading.Condition()
        # The number of the next request, and of this worker's own.
        self._next, self._own = 0, list[int]()
        # Request that this worker's script waits for, and the answer.
        self._asked: dict[str, Any] | None = None
        self._found: Any = _NOT_YET
        # Value that this worker has and gives to the others.
        self._given: tf.Tensor | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        # Whether a worker has ended, and at which step of this one that was seen.
        self._has_left, self._seen_in = False, 0

    def add(self, variable: Any, form: str, name: str) -> int:
        """Registers a variable; returns its number.

        Args:
            form: Its shape and dtype, as text that must be equal on all workers.
        """
        with failure.translate_errors(self._control.task):
            self._control.check_same("variable in shares", form, f"{name} ({form})")
        self._variables.append(variable)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shares", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch, name="shares watch", daemon=True).start()
            atexit.register(self._leave)
        return len(self._variables) - 1

    def release(self, number: int) -> None:
        """Lets go of a variable, by its number; also while objects are collected."""
        self._released.append(number)

    @contextlib.contextmanager
    def restores(self) -> Iterator[None]:
        """Context in which this worker alone assigns values, of which all take their parts."""
        self.restoring = True
        try:
            yield
        finally:
            self.restoring = False

    def read(self, variable: Any) -> tf.Tensor:
        """The whole value of a variable; the other workers need not ask for it."""
        steps, writes = self._progress.steps, variable.writes
        return self._submit(variable=variable.number, steps=steps, writes=writes)

    def give(self, variable: Any, value: tf.Tensor) -> None:
        """Gives all workers their parts of a value; the others need not ask for it."""
        self._given = value
        self._submit(variable=variable.number, steps=0, writes=0, gives=True)
        self._given = None

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Context in which all workers read and change the same variables in the same order.

        They wait for each other once, at its beginning, and what they read is gathered by all.
        """
        if self.restoring or self.is_together or not tf.executing_eagerly():
            yield
            return
        self.meet("several variables", name)
        with failure.translate_errors(self._control.task), self.is_together.raised():
            yield

    def meet(self, of: str, name: str) -> None:
        """Waits until the scripts of all workers change a variable, and answers meanwhile.

        Args:
            of: The variable's number, in words.
            name: Its name on this worker, for messages.
        """
        if self._has_left:
            raise RuntimeError(
                "A variable in shares is changed on a worker while the script of another one has "
                "ended. Every worker must run the same script. Received: a change of "
                f"'{name}' on {self._control.names[self._number]}"
            )
        if self.is_together:
            return
        with failure.translate_errors(self._control.task):
            self._control.exchange(f"a change of {of} in shares", name)

    def _submit(self, **request: Any) -> Any:
        """Has all workers answer a request of this one; returns the answer."""
        begin, number = time.monotonic(), -1
        with failure.translate_errors(self._control.task), self._reading:
            self._asked = request
            try:
                while True:
                    with self._changed:
                        while self._next == number and self._error is None:
                            self._changed.wait(_POLL_SECONDS)
                            self._check_peers()
                        if self._found is not _NOT_YET:
                            return self._found
                        if self._error is not None:
                            raise self._error
                        if time.monotonic() - begin > _PATIENCE_SECONDS:
                            raise error_of(request, self._control.task.name)
                        number = self._next
                    self._offer(number, request)
            finally:
                with self._changed:
                    self._asked, self._found = None, _NOT_YET

    def _offer(self, number: int, request: dict[str, Any]) -> None:
        """Writes a request under the next number, which another worker may have taken."""
        text = json.dumps({"by": self._number, **request})
        with contextlib.suppress(tf.errors.OpError, ValueError):
            context.context().set_config_key_value(self._key(number), text)

    def _asked_by(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """This worker's own request, if the answer to another one answers it as well."""
        own = self._asked
        is_same = own is not None and is_answered(own, self._number, request)
        return own if is_same else None

    def _check_peers(self) -> None:
        if self._control.lost:
            error = TimeoutError("a worker that has parts of variables is gone")
            failure.raise_if_peer_gone(self._control.task, error, self._control.lost)

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"

    def _serve(self) -> None:
        try:
            while "ended" not in (request := json.loads(listen(self._key(self._next)))):
                self._answer(request)
        except Exception as error:  # Raised again by who reads.
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _watch(self) -> None:
        """Says now and then which variables are released, and whether a step here waits."""
        offered = -1
        while self._error is None:
            time.sleep(_POLL_SECONDS)
            if self._released and self._next > offered:
                # Once at a time: all workers count the releases.
                offered = self._next
                self._offer(offered, {"released": list(self._released)})
            self._look_at_step()

    def _look_at_step(self) -> None:
        """Says so if a step here has waited since a worker has left."""
        progress = self._progress
        if self._has_left and progress.doing is not None and progress.entered == self._seen_in:
            with contextlib.suppress(tf.errors.OpError, ValueError):
                context.context().set_config_key_value(self._key("waiting"), "")
        self._seen_in = progress.entered

    def _answer(self, request: dict[str, Any]) -> None:
        mine, answer = request["by"] == self._number, None
        self._has_left |= "left" in request
        for number in request.get("released", ()):
            self._releases[number] += 1
            if self._releases[number] == len(self._everyone):
                self._variables[number] = None
            if mine:
                self._released.remove(number)
        own = self._asked_by(request)
        if "variable" in request:
            variable = self._wait_for(request)
            with tf.device(self._host._device):
                # One may have to read something else before it has what is asked for.
                ready = self._host.all_reduce(tf.constant(float(variable is not None)))
                # By now, this worker may ask for it as well.
                own = self._asked_by(request)
                if int(ready) < len(self._everyone):
                    answer = _NOT_YET
                elif "gives" in request:
                    variable.receive(self._host, self._given if mine else None)
                else:
                    answer = variable.collected(self._sharing, own is not None)
        with self._changed:
            if mine:
                self._own.append(self._next)
            if own is not None and own is self._asked:
                self._found = answer
            self._next += 1
            self._changed.notify_all()
        if "variable" in request:
            # All have taken part, and so have read all requests up to this one.
            for number in self._own:
                context.context().delete_config_key_value(self._key(number))
            self._own = []

    def _wait_for(self, request: dict[str, Any]) -> Any:
        """Waits for a variable, for the asking worker's step, and for what it has loaded.

        Returns:
            The variable; None if this worker's script waits for an answer, too.
        """
        begin, number = time.monotonic(), request["variable"]
        while True:
            made = self._variables[number] if number < len(self._variables) else None
            is_there = made is not None and made.is_placed and made.writes >= request["writes"]
            if is_there and self._progress.steps >= request["steps"]:
                return made
            if request["by"] != self._number and self._reading.locked():
                return None
            if time.monotonic() - begin > _PATIENCE_SECONDS:
                # Collectives of the asking worker end with it.
                error = error_of(request, self._control.task.name)
                failure.report(str(error))
                raise error
            time.sleep(0.002)

    def _leave(self) -> None:
        """Waits until all workers have ended, or one waits for this in a step."""
        if signals.is_bad() or failure.has_failed() or self._error is not None:
            return
        names, begin, has_said = self._control.names, time.monotonic(), False
        try:
            self._submit(left=True)
            leave.post(names[self._number])
            for name in names:
                while not leave.has_left(name, _POLL_SECONDS):
                    if self._has("waiting") or self._error is not None or self._control.lost:
                        return
                    if not has_said and time.monotonic() - begin > _SILENT_SECONDS:
                        has_said = True
                        logger.info(
                            "%s has ended its script, and stays until %s ends: that may read parts "
                            "of variables that are here",
                            *(names[self._number], name),
                        )
            self._end_thread()
        except Exception:
            return  # The chief, which has the keys, has ended, or the job has failed.

    def _end_thread(self) -> None:
        """Ends the thread, of all workers, once all have left.

        One that TensorFlow answered while the interpreter ends would take the process with it.
        """
        end = time.monotonic() + _POLL_SECONDS
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < end:
            # Under the number that comes after what it is about to answer.
            self._offer(self._next, {"ended": True})
            self._thread.join(_END_SECONDS)

    def _has(self, name: str) -> bool:
        try:
            context.context().get_config_key_value(self._key(name), 1)
        except tf.errors.DeadlineExceededError:
            return False
        return True
