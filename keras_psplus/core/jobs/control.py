"""The control plane: what workers tell each other outside of training steps.

Short texts travel through the key-value store of TensorFlow's coordination service. Every message
has a place in one sequence that all workers run through, so that workers that are about to do
different things (a model with one more variable, a callback that stopped one worker only) find
out at once and by name, instead of waiting for each other in different collectives.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent import futures
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from keras_psplus import errors
from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.preflight import is_large
from keras_psplus.core.jobs import failure
from keras_psplus.errors import PeerLostError
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

_POLL_SECONDS = 3.0
_ALL = "all"  # in a large cluster, the place of all workers' texts
_STOP = "stop"  # the place of who has stopped within an epoch
_ASK_SECONDS = 0.5
# TensorFlow keeps some 20 kB, and more on the leader, for each request that runs out of time.
_LISTEN = 3_600_000
_FALLEN_OUT = "Workers have fallen out of step: "
_LOST = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError


class Stop(NamedTuple):
    """Position in an epoch at which a worker has stopped training."""

    steps: int
    name: str
    where: str


class ControlPlane:
    """Compares and exchanges texts between the workers of one job.

    Args:
        timeout: Seconds to wait for a peer at the same point of the script before giving up.
        stall_warning: Seconds after which it is said for whom it waits; None for never.
        silent: Function that returns the names of workers that have been silent for too long.
    """

    def __init__(
        self,
        task: TaskConfig,
        timeout: float,
        stall_warning: float | None,
        silent: Callable[[], Collection[str]],
    ) -> None:
        self.task, self._silent = task, silent
        self._names = [task_name(job, index) for job, index, _ in task.tasks() if job != "ps"]
        self._timeout, self._stall_warning = timeout, stall_warning
        self._sequence = 0
        # This worker's messages that others may be yet to read: numbers and keys.
        self._posted: list[tuple[int, str]] = []

    @property
    def lost(self) -> Collection[str]:
        """Names of workers that have been silent for too long."""
        return self._silent()

    @property
    def names(self) -> list[str]:
        """Names of all workers, in rank order."""
        return list(self._names)

    def check_same(self, kind: str, fingerprint: str, description: str) -> str:
        """Raises on all workers if one of them differs from the first.

        Args:
            kind: What the workers are doing, such as `"variable"`.
            fingerprint: Text that must be equal on all workers.

        Returns:
            The first worker's description.

        Raises:
            ValueError: If this worker differs; the others get the text by TensorFlow's own
                error propagation.
        """
        message = f"{kind}\n{fingerprint}\n{description}"
        leader = self._names[0]
        if self.task.name == leader:
            self._put(message)
            self._sequence += 1
            return description
        theirs = self._get(leader, kind)
        self._sequence += 1
        if theirs.split("\n")[:2] != message.split("\n")[:2]:
            self._fall_out(
                f"Workers have fallen out of step: {leader} is at {_readable(theirs)}, "
                f"{self.task.name} is at {_readable(message)}. Every worker must run the same "
                "script and build the same model in the same order. "
                f"Received: {_readable(message)} on {self.task.name} ({self.task.address})"
            )
        return theirs.split("\n", 2)[2]

    def exchange(self, kind: str, text: str) -> list[str]:
        """Gives every worker's text to every worker, in rank order.

        In a large cluster, the first worker reads all texts and the others read them from it.
        """
        self._put(f"{kind}\n\n{text}")
        large = is_large(len(self._names))
        if large and self.task.name != self._names[0]:
            # Who is at something else has no texts for those that are at this.
            self._text_of(self._names[0], kind)
            texts: list[str] = json.loads(self._get(_ALL, kind))
        else:
            texts = [self._text_of(name, kind, large) for name in self._names]
            if large:
                self._put(json.dumps(texts), _ALL)
        self._delete_read()
        self._sequence += 1
        return texts

    def _text_of(self, name: str, kind: str, for_all: bool = False) -> str:
        """Waits for a worker's message of this exchange and checks its kind."""
        theirs = self._get(name, kind, for_all)
        their_kind, _, their_text = theirs.split("\n", 2)
        if their_kind != kind:
            self._fall_out(
                f"Workers have fallen out of step: {name} is at {_readable(theirs)}, "
                f"{self.task.name} is at {kind}. A callback or a condition in the script "
                "that holds on some workers only is the usual cause; every worker must take "
                f"the same steps. Received: {kind} on {self.task.name}"
            )
        return their_text

    def post_end(self, message: str) -> None:
        """Answers those who wait for this worker, or will soon, that it comes no more.

        Args:
            message: What `failure.raise_if_ended` knows.
        """
        for sequence in (self._sequence, self._sequence + 1):
            try:
                context.context().set_config_key_value(self._key(sequence), message)
            except (tf.errors.OpError, ValueError):
                continue  # it has been there already, and has said something else

    def post_stop(self, steps: int, where: str) -> None:
        """Says that this worker ends the epoch here.

        Args:
            steps: `Progress.steps` of this process.
        """
        try:
            self._put(f"{steps}\n{self.task.name}\n{where}", _STOP)
        except tf.errors.OpError:
            pass  # Another one has said the same.

    def stop_of_another(self) -> Stop | None:
        """The stop that another worker has announced in this epoch, or None."""
        key = self._key(self._sequence, _STOP)
        try:
            text = context.context().get_config_key_value(key, int(_ASK_SECONDS * 1000))
        except tf.errors.DeadlineExceededError:
            return None
        steps, name, where = text.split("\n")
        return Stop(int(steps), name, where)

    def post(self, name: str, text: str) -> bool:
        """Posts a text that is no step of the sequence, once in a job.

        Returns:
            False if a text of that name is there already.
        """
        try:
            self._call(context.context().set_config_key_value, _posted_key(name), text)
        except tf.errors.AlreadyExistsError:
            return False
        return True

    def listen(self, name: str) -> str:
        """Waits for a text that another worker posts, without end: for a separate thread."""
        return listen(_posted_key(name))

    def wait_for(self, name: str, whom: str, kind: str) -> str:
        """Waits for a text that another worker posts, as `exchange` waits."""
        return self._wait(_posted_key(name), whom, kind)

    def end_after(self, stop: Stop, at: str | None) -> None:
        """Ends the steps of all workers, as one has stopped."""
        # TensorFlow cuts what it passes on.
        message = (
            f"Workers have fallen out of step: {stop.name} has stopped training {stop.where}, "
            f"{self.task.name} is at {at}. Set `stop_training` on all workers after the same "
            f"batch, or at an epoch's end. Received: stop_training=True on {stop.name} alone"
        )
        self.post_end(message)
        failure.report(message)
        context.context().abort_collective_ops(tf.errors.INVALID_ARGUMENT, message)

    def _fall_out(self, message: str) -> NoReturn:
        """Tells the other workers to stop, with the reason, and raises it here."""
        failure.report(message)
        raise ValueError(message)

    def _delete_read(self) -> None:
        """Deletes messages of earlier exchanges, which all workers have read."""
        read = [key for sequence, key in self._posted if sequence < self._sequence]
        self._posted = [one for one in self._posted if one[0] >= self._sequence]

        def delete() -> None:
            for key in read:
                context.context().delete_config_key_value(key)

        if read:
            self._call(delete)

    def _put(self, message: str, name: str | None = None) -> None:
        key = self._key(self._sequence, name)
        self._posted.append((self._sequence, key))
        self._call(context.context().set_config_key_value, key, message)

    def _key(self, sequence: int, name: str | None = None) -> str:
        return f"keras_psplus/{sequence}/{name or self.task.name}"

    def _get(self, name: str, kind: str, for_all: bool = False) -> str:
        whom = f"one that {self._names[0]} waits for" if name == _ALL else name
        return self._wait(self._key(self._sequence, name), whom, kind, for_all)

    def _wait(self, key: str, whom: str, kind: str, for_all: bool = False) -> str:
        start, schedule = time.monotonic(), stalls.WarningSchedule(self._stall_warning)
        while True:
            try:
                text: str = self._call(
                    context.context().get_config_key_value, key, int(_POLL_SECONDS * 1000)
                )
                if schedule.has_warned:
                    waited = time.monotonic() - start
                    logger.warning("%s at %s goes on after %.0f s", self.task.name, kind, waited)
                try:
                    failure.raise_if_ended(self.task, text)
                except PeerLostError:
                    if for_all:
                        self._put(text, _ALL)
                    raise
                if text.startswith(_FALLEN_OUT):
                    raise ValueError(text)
                return text
            except tf.errors.DeadlineExceededError as error:
                failure.raise_if_peer_gone(self.task, error, self._silent())
                waited = time.monotonic() - start
                if waited > self._timeout:
                    raise RuntimeError(
                        f"{self.task.name} waited {waited:.0f} s at {kind} for {whom}, which is "
                        "alive but did not come to the same point. Every worker must run the same "
                        f"script. Received: timeout={self._timeout:.0f} s"
                    ) from None
                if schedule.is_due(waited):
                    schedule.note_warned(waited)
                    logger.warning(
                        "%s at %s has waited %.0f s of %.0f s for the others; not arrived: %s",
                        self.task.name,
                        kind,
                        waited,
                        self._timeout,
                        whom,
                    )

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the service from a separate thread: a hanging leader would never answer."""
        result: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def call() -> None:
            try:
                result.put((function(*args), None))
            except Exception as error:  # Raised again by the caller.
                result.put((None, error))

        threading.Thread(target=call, daemon=True).start()
        while True:
            try:
                value, error = result.get(timeout=2 * _POLL_SECONDS)
            except queue.Empty:
                hang = TimeoutError(f"no answer from the coordination service at {self._names[0]}")
                failure.raise_if_peer_gone(self.task, hang, self._silent())
                continue
            if isinstance(error, _LOST):
                # The worker that has the service may be dead.
                with failure.translate_errors(self.task):
                    raise error
            if error is not None:
                raise error
            return value


def listen(key: str) -> str:
    """Waits without end until a key is written in the store, and returns its text."""
    while True:
        try:
            text: str = context.context().get_config_key_value(key, _LISTEN)
            return text
        except tf.errors.DeadlineExceededError:
            continue


def _posted_key(name: str) -> str:
    return f"keras_psplus/posted/{name}"


def _readable(message: str) -> str:
    kind, _, description = (message.split("\n", 2) + ["", ""])[:3]
    return f"{kind} {description}".strip()


# Functions that the chief runs for all workers while they wait.


# After which the others hear that it goes on.
_TURN_SECONDS = 20.0
# Kinds of errors of the chief that all workers raise.
_ERRORS: dict[str, type[Exception]] = {
    "OSError": OSError,
    "ValueError": ValueError,
    **{name: getattr(errors, name) for name in errors.__all__},
}


def run_on_chief(
    control: ControlPlane | None, is_chief: bool, what: str, work: Callable[[], Any]
) -> Any:
    """Has the chief do something; to be called on all workers.

    However long it takes, the others know that the chief is at it, and what fails there, fails
    everywhere.

    Args:
        work: Function without arguments that returns what can be turned into JSON.


    Raises:
        Exception: What it has raised there.
    """
    if control is None:
        return work()
    if not is_chief:
        message: dict[str, Any] = {"goes_on": True}
        while message.get("goes_on"):
            message = json.loads(control.exchange(what, "")[0])
        if "error" in message:
            raise _ERRORS.get(message["kind"], RuntimeError)(message["error"])
        return message["result"]
    # Not in this thread, which talks to the others.
    pool = futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    while not futures.wait([future], _TURN_SECONDS).done:
        control.exchange(what, json.dumps({"goes_on": True}))
    error = future.exception()
    if error is not None:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        message = {"error": f"{error}", "kind": next((k for k in kinds if k in _ERRORS), "")}
        control.exchange(what, json.dumps(message))
        raise error
    control.exchange(what, json.dumps({"result": future.result()}))
    return json.loads(json.dumps(future.result()))
