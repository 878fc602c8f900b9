"""Workers that are gone, stopped or slow, and the times of steps."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.handshake import is_silent, places_of
from keras_psplus.cluster.monitor import stalls, trace
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.monitor.stalls import PendingWait
from keras_psplus.cluster.monitor.step_times import PeerConnections, StepTimes
from keras_psplus.cluster.monitor.trace import Span, TraceRecorder
from keras_psplus.cluster.preflight import is_large, neighbours
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.core.jobs import failure
from keras_psplus.log import logger
from keras_psplus.tf_internals import context
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    from keras_psplus.core.jobs.control import ControlPlane


# Times of a worker's steps: for its batches, in collectives, and between two steps.
#
# A step's graph adds up when its batches have arrived and when it was done with them; the host adds
# up when it has called the step, and when that returned. Nobody reads a clock's variable during a
# step. Calls in which something is traced are left out.

# Small numbers, so that sums of many keep microseconds.
_ORIGIN = time.time()
ARRIVED, DONE = range(2)
# So old are times at most that are asked for during a step.
_LAST_SECONDS = 0.5


class StepClock:
    """Clock of the training and evaluation steps of this process.

    Attributes:
        measures: Whether steps are timed in their graph: those of one replica. Several replicas of
            one graph would wait for each other's clocks.
    """

    def __init__(self) -> None:
        self.measures = False
        self._name = ""
        self._recorder: TraceRecorder | None = None
        self._connections: PeerConnections | None = None
        self._meets: Callable[[], float] = lambda: 0.0
        self._sums: tf.Variable | None = None
        self._traced_from: np.ndarray | None = None
        self._left_out = np.zeros(3)
        self._steps = self._called = self._returned = self._host = self._data = 0.0
        self._ended: float | None = None
        self._is_single, self._is_called, self._entered = True, False, 0
        self._last, self._last_at = StepTimes(), 0.0

    def start(self, task: TaskConfig, progress: Progress, meets: Callable[[], float]) -> None:
        """Starts to measure."""
        self.measures, self._meets = True, meets
        self._name, self._recorder = task.name, trace.current()
        self._connections = PeerConnections(
            {task_name(j, i): address for j, i, address in task.peers(("chief", "worker"))}
        )
        progress.times = lambda: {task.name: self.times()} if self._sums is not None else {}
        progress.begin_epoch, progress.timing = self._begin_epoch, self.call

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which a step is traced, before it runs for the first time."""
        if self._traced_from is None and self._is_called:
            with ops.init_scope():
                self._traced_from = self._read()
        yield

    def _begin_epoch(self) -> None:
        """Starts an epoch: time before its first step is not between two steps."""
        self._ended = None

    @contextlib.contextmanager
    def call(self, steps: int) -> Iterator[None]:
        """Context of a call of a compiled function."""
        recorder = self._recorder
        if recorder is not None and not recorder.wants(self._name):
            recorder = self._recorder = None
        if self._is_single != (steps == 1):
            self._go_on_from(self._data_seconds(self._read()))
            self._is_single = steps == 1
        before = None if recorder is None else self._read()
        called = time.time()
        self._entered += 1
        self._is_called = True
        try:
            yield
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            # Of a step that has failed, the graph may have added up one moment of two.
            self._go_on_from(self._data)
            raise
        finally:
            self._is_called = False
        returned = time.time()
        if recorder is not None and before is not None:
            arrived, done = (float(one) for one in (self._read() - before + _ORIGIN)[:2])
            met = recorder.collective
            ready = [] if met is None else [float(moment) for moment in met.numpy()]
            spans = _spans(called, returned, arrived, done, ready if steps == 1 else None)
            recorder.add(self._name, spans)
        ended, self._ended = self._ended, returned
        if self._traced_from is not None:
            before, self._traced_from = self._traced_from, None
            self._left_out += self._read() - before
            return
        self._steps += steps
        self._called += called - _ORIGIN
        self._returned += returned - _ORIGIN
        if ended is not None:
            self._host += called - ended
        if returned - self._last_at > _LAST_SECONDS:
            self._last, self._last_at = self._now(), returned

    def mark(self, moment: int, tensors: list[Any]) -> None:
        """Adds up the moment at which tensors are there, in the step's graph."""
        # Others than `fit` and `evaluate` also take steps, and do not say when they call them.
        if not self.measures or not self._is_called:
            return
        with ops.device("CPU:0"):
            if self._sums is None:
                self._sums = made_outside(lambda: tf.zeros([2], tf.float64))
            with tf.control_dependencies(tensors):
                now = tf.timestamp() - _ORIGIN
            zero = tf.zeros([], tf.float64)
            both = [now, zero] if moment == ARRIVED else [zero, now]
            self._sums.assign_add(tf.stack(both), read_value=False)

    def times(self) -> StepTimes:
        """Times of all steps up to now.

        On another thread than the one that trains, up to a moment ago if a step is under way.
        """
        entered = self._entered
        if self._is_called:
            return self._last
        now = self._now()
        return self._last if entered != self._entered else now

    def _now(self) -> StepTimes:
        read = self._read()
        seconds, self._data = self._returned - self._called, self._data_seconds(read)
        peers = {} if self._connections is None else self._connections.totals()
        return StepTimes(
            steps=self._steps,
            seconds=seconds,
            data=self._data,
            host=self._host,
            meets=min(max(0.0, float((read - self._left_out)[2])), seconds - self._data),
            peers=peers,
        )

    def _data_seconds(self, read: np.ndarray) -> float:
        """Seconds of waiting for batches up to what was read."""
        arrived, done, _ = read - self._left_out
        # Of several steps in a call, each begins when the one before is done.
        begun = self._called if self._is_single else self._called + done - self._returned
        return float(min(max(0.0, arrived - begun), self._returned - self._called))

    def _go_on_from(self, data: float) -> None:
        """Leaves out what the graph has added up, but for some seconds for data."""
        moments = self._called + data, self._returned
        self._left_out[:2] = self._read()[:2] - moments
        self._traced_from = None

    def _read(self) -> np.ndarray:
        moments = np.zeros(2) if self._sums is None else self._sums.numpy()
        return np.append(moments, self._meets())


def _spans(
    called: float, returned: float, arrived: float, done: float, met: list[float] | None
) -> list[Span]:
    """Spans of a call, and of its parts unless it takes several steps."""
    spans = [Span(trace.STEP, called, returned)]
    if met is None or not called <= arrived <= done <= returned:
        return spans
    spans.append(Span(trace.READ, called, arrived))
    if not met or not arrived <= met[0] <= met[1] <= done:
        return [*spans, Span(trace.COMPUTE, arrived, done)]
    return [
        *spans,
        Span(trace.COMPUTE, arrived, met[0]),
        Span(trace.COLLECTIVE, met[0], met[1]),
        Span(trace.UPDATE, met[1], done),
    ]


# Detection of the workers that have not reached a step.
#
# A worker that has waited at a step for a moment posts that in the key-value store of TensorFlow's
# coordination service. While steps go on, nothing is sent.

# Marks of a step's progress, for the message of a worker that waits.
#
# A step's graph increments one counter when its batch has arrived, and another when the step is
# done. A thread reads both counters during a step that takes long.

TRACING, NO_DATA, RUNNING = "traces its step", "waits for its data", "has its batch"


class StepMarks:
    """Counts the batches of each local replica at two points of its steps."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self._counts: dict[str, tf.Variable] = {}
        self._tracing = 0

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        self._tracing += 1
        try:
            with self.clock.tracing():
                yield
        finally:
            self._tracing -= 1

    def received(self, device: str, batch: Any) -> None:
        """Counts a batch once it is there, in the step's graph."""
        self._count(device, 0, batch)

    def finished(self, device: str, results: Any) -> None:
        """Counts a batch once the step is done with it, in the step's graph."""
        self._count(device, 1, results)

    @property
    def state(self) -> str:
        """State of this worker's step: `TRACING`, `NO_DATA` or `RUNNING`."""
        counts = [variable.numpy() for variable in list(self._counts.values())]
        if self._tracing or not counts:
            return TRACING
        # A replica whose counts are equal has not got its batch.
        return NO_DATA if any(received == done for received, done in counts) else RUNNING

    def _count(self, device: str, at: int, structure: Any) -> None:
        tensors = [t for t in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(t)]
        needed = tensors[:1] if at == 0 else tensors
        with tf.control_dependencies(needed):
            one = [1 - at, at]
            self._of(device).assign_add(tf.constant(one, tf.int64), read_value=False)
        self.clock.mark(DONE if at else ARRIVED, needed)

    def _of(self, device: str) -> tf.Variable:
        if device not in self._counts:
            self._counts[device] = made_outside(lambda: tf.zeros([2], tf.int64), device)
        return self._counts[device]


_ASK_SECONDS = 0.5


class StallProbe(stalls.StallProbe):
    def __init__(self, task: TaskConfig, progress: Progress, marks: StepMarks) -> None:
        super().__init__(task.name, progress)
        self._task, self._marks = task, marks
        self._others = {
            task_name(job, index): address
            for job, index, address in task.peers(("chief", "worker"))
        }
        self._asks_first_only = is_large(1 + len(self._others)) and not task.is_chief
        self._last: int | None = None
        self._posted: tuple[int, str] | None = None
        self._calling: threading.Thread | None = None

    def look(self) -> dict[int, PendingWait]:
        waits, entered = super().look(), self._progress.entered
        if self._posted is not None and self._posted[0] != entered:
            self._withdraw()
        if waits:
            if entered == self._last:
                self._post(entered)
            self._last = entered
        return waits

    def describe(self, entered: int) -> str:
        return f"a collective; not arrived: {self.missing(entered)}"

    def missing(self, entered: int) -> str:
        """Names the workers that have not reached a step, or the state of all.

        In a large cluster the first worker asks all others, and these ask the first one only.
        """
        if self._asks_first_only:
            return self._missing_by_first(entered)
        silent = stalls.unresponsive_tasks(self._others)
        # The first of all workers has the store.
        can_ask = next(iter(self._others), None) not in silent or self._task.is_chief
        states: dict[str, str | None] = {self._task.name: self._marks.state}
        if can_ask:
            states |= {n: self._state_of(n, entered) for n in self._others if n not in silent}
        missing = [f"{name} (no answer)" for name in silent]
        missing += [name for name, state in states.items() if state is None]
        return ", ".join(missing) or _all_arrived(states)

    def _missing_by_first(self, entered: int) -> str:
        first, address = next(iter(self._others.items()))
        if stalls.unresponsive_tasks({first: address}):
            return f"{first} (no answer)"
        if self._state_of(first, entered) is None:
            return first
        return f"one that {first} waits for, and names in its log"

    def _state_of(self, name: str, entered: int) -> str | None:
        """State of another worker in a step, or None if it has not reached it."""
        try:
            return context.context().get_config_key_value(
                _key(name, entered), int(_ASK_SECONDS * 1000)
            )
        except tf.errors.OpError:
            return None

    def _post(self, entered: int) -> None:
        """Lets the others know where in a step this worker is."""
        posted = entered, self._marks.state
        if posted != self._posted:
            self._withdraw()
            self._call_in_thread(context.Context.set_config_key_value, *posted)
            self._posted = posted

    def _withdraw(self) -> None:
        if self._posted is not None:
            self._call_in_thread(context.Context.delete_config_key_value, self._posted[0])
        self._posted = None

    def _call_in_thread(self, method: Callable[..., Any], entered: int, *text: str) -> None:
        """Calls the store from a separate thread: one that hangs would never answer."""

        def call() -> None:
            try:
                method(context.context(), _key(self._task.name, entered), *text)
            except (tf.errors.OpError, ValueError):
                pass  # The job is about to end.

        before, self._calling = self._calling, threading.Thread(target=call, daemon=True)
        if before is not None:
            # A note that changes is deleted, and then written.
            before.join(_ASK_SECONDS)
        self._calling.start()


def _all_arrived(states: Mapping[str, str | None]) -> str:
    """Describes the wait of workers that have all reached a step."""
    if set(states.values()) == {RUNNING}:
        return (
            "none; all workers have their batches and have not finished the step: a computation "
            "takes long, or a connection between them is stuck"
        )
    return "none; " + ", ".join(f"{name} {state}" for name, state in states.items())


def _key(name: str, entered: int) -> str:
    return f"keras_psplus/stalls/{entered}/{name}"


# Counts a worker as dead that has not answered for `heartbeat_timeout`.
#
# TensorFlow's coordination service sends heartbeats at half of its timeout, so that a worker that
# stops counts as dead after anything between half of it and the whole; the first worker, which has
# the service, after what is left of a call. Here the workers ask each other as often as the figure
# needs, and TensorFlow's service is given `service_seconds`, with which it is always later. Workers
# have no port but TensorFlow's while they train, and so no control channel with a keepalive; and
# while steps go on, nothing is sent.

_LONGEST_ANSWER_SECONDS, _MOST_THREADS = 1.0, 64


def service_seconds(timeout: float) -> float:
    """Heartbeat timeout of TensorFlow's service for a job's `timeout`.

    A stop of `timeout` at any moment is shorter than it.
    """
    return 3 * timeout


class Silence:
    """Since when others have been silent."""

    def __init__(self, timeout: float, answer: float) -> None:
        # Questions from just before the stop may be answered late.
        self._limit, self._longest_gap = timeout - answer / 2, 2 * answer + timeout / 4
        self._since: dict[str, float] = {}
        self._last: float | None = None

    def note(self, silent: Iterable[str], asked: float, now: float) -> dict[str, float]:
        """Notes who did not answer."""
        if self._last is not None and now - self._last > self._longest_gap:
            # This process itself was stopped: the time does not count.
            self._since.clear()
            silent = ()
        self._last = now
        self._since = {name: self._since.get(name, asked) for name in silent}
        spans = {name: now - since for name, since in self._since.items()}
        return {name: span for name, span in spans.items() if span >= self._limit}


class HeartbeatWatch:
    """Asks the other workers, from a separate thread, whether they are alive.

    Each asks all others, as it stands still itself; in a large cluster, its neighbours. A worker
    that finds one dead ends its own collectives with an error that names it, and in a large cluster
    tells the others, who may not ask that one.
    """

    def __init__(self, task: TaskConfig, timeout: float) -> None:
        self._task, self._timeout = task, timeout
        workers = [one for one in task.tasks() if one[0] in ("chief", "worker")]
        own = [one[:2] for one in workers].index((task.task_type, task.task_index))
        self._addresses = {
            task_name(job, index): address for job, index, address in neighbours(workers, own)
        }
        self._asks_some = is_large(len(workers))
        self._answer = min(_LONGEST_ANSWER_SECONDS, timeout / 8)
        self.lost: tuple[str, ...] = ()

    _asks = staticmethod(is_silent)

    def start(self, progress: Progress) -> None:
        """Begins to ask.

        Args:
            progress: `Progress` of this process. While steps go on, nobody is asked.
        """
        threading.Thread(
            target=self._run, args=(progress,), name="heartbeat watch", daemon=True
        ).start()

    def _run(self, progress: Progress) -> None:
        places = {name: places_of(address) for name, address in self._addresses.items()}
        silence = Silence(self._timeout, self._answer)
        entered: int | None = None
        with concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, len(places))) as pool:
            while not self.lost:
                time.sleep(self._answer / 4)
                before, entered = entered, progress.entered
                asked = time.monotonic()
                silent: list[str] = []
                if before == entered:
                    limits = [self._answer] * len(places)
                    try:
                        answers = list(pool.map(self._asks, places.values(), limits))
                    except RuntimeError:  # The interpreter ends, and with it all pools.
                        return
                    silent = [name for name, is_so in zip(places, answers) if is_so]
                dead = silence.note(silent, asked, time.monotonic())
                if dead:
                    self.lost = tuple(dead)
                    self._end(max(dead.values()))

    def _end(self, span: float) -> None:
        named = ", ".join(f"{name} ({self._addresses[name]})" for name in self.lost)
        cause = f"no answer for {span:.0f} s, with heartbeat_timeout={self._timeout:g}"
        message = failure.LOST + failure.lost_message(named, self._task.name, cause)
        logger.warning("%s", message.removeprefix(failure.LOST))
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)
        if self._asks_some:
            # In a thread: the first worker, which has the service, may be the dead one.
            threading.Thread(target=failure.report, args=[message], daemon=True).start()


# Ends a job in which only some workers have stopped within an epoch.
#
# `model.stop_training = True` after a batch ends the epoch on that worker; the others would wait in
# their next step for its gradients. The worker posts its stop in the key-value store of
# TensorFlow's coordination service, once; a worker that waits in a step reads it. While steps go
# on, nothing is sent: TensorFlow keeps some 20 kB for each request for a key that nobody has
# written, so that only those steps are looked at that take longer than others do, and more and more
# seldom.
#
# With `updates=`, workers may step without each other, and a worker that has stopped is missed only
# in a step that needs it. There a step has to wait for longer before it reads.


# So long for each so many workers, whom the first of them answers.
_LOOK_SECONDS, _WORKERS = 1.0, 32
# For a step that may be one without the others: longer than such a step takes.
_ALONE_SECONDS = 10.0


def watch(
    control: ControlPlane, progress: Progress, marks: StepMarks, takes_steps_alone: bool
) -> None:
    """Starts a thread that checks whether a step waits for a stopped worker."""
    args = control, progress, marks, takes_steps_alone
    threading.Thread(target=_run, args=args, name="stop watch", daemon=True).start()


def _run(
    control: ControlPlane, progress: Progress, marks: StepMarks, takes_steps_alone: bool
) -> None:
    last, seconds = None, _LOOK_SECONDS * max(1, len(control.names) / _WORKERS)
    least = _ALONE_SECONDS if takes_steps_alone else seconds
    # Seconds that this step has stood still, and those before it; and when to look at it.
    still, usual, due = 0.0, 0.0, least
    while True:
        time.sleep(seconds)
        before, last = last, progress.entered
        stands = before == last and progress.doing == "training step"
        if stands and takes_steps_alone:
            # One that is traced, or has no data, waits for no worker either.
            stands = marks.state == RUNNING
        if not stands:
            usual, still = max(usual / 2, still), 0.0
            due = max(least, 1.5 * usual)
            continue
        still += seconds
        if still < due:
            continue
        due = 2 * still
        try:
            stop = control.stop_of_another()
            if stop is not None and stop.steps <= progress.steps and last == progress.entered:
                control.end_after(stop, progress.at)
                return
        except (tf.errors.OpError, ValueError):
            continue  # The job is about to end.
