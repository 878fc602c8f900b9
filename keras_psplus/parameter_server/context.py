"""The objects that a strategy's steps are made with, and their times."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.cluster.config import task_name
from keras_psplus.cluster.monitor import trace
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.monitor.step_times import StepTimes
from keras_psplus.cluster.monitor.trace import Span
from keras_psplus.log import logger
from keras_psplus.parameter_server.queue import Run
from keras_psplus.parameter_server.traffic import READ, SEND, CallCosts, Part, TrafficTotals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keras_psplus.core.distributed_engine import DistributedEngine
    from keras_psplus.parameter_server.extended import ParameterServerExtended
    from keras_psplus.parameter_server.scheduler import Scheduler
    from keras_psplus.parameter_server.worker_updates import WorkerUpdates


# Times of steps by task, added up on the chief, which sends nothing for them.
#
# chief    read ─┬─ wait ─────────────────────────────────┬─ update (`mode="sync"`) ─ callbacks
# worker         └─ call ─ read ─ compute ─ send ─ result ─┘
#                          [ timed in its graph ]


_CHIEF = task_name("chief", 0)


class WorkerTimes:
    def __init__(self, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._times: dict[str, StepTimes] = {}
        self._begun: set[tuple[int, int]] = set()
        self._recorder = trace.current()
        # Runs of a synchronous step, until that is over.
        self._open: dict[str, tuple[Run, CallCosts, int]] = {}
        self._lanes: dict[str, list[float]] = {}
        self._is_tracing, self._returned = False, 0.0
        progress.times, progress.begin_epoch = self.times, self._begin_epoch

    def times(self) -> dict[str, StepTimes]:
        with self._lock:
            return dict(self._times)

    def _begin_epoch(self) -> None:
        """Starts an epoch: time before its first step is not between two steps."""
        self._returned = 0.0

    def note_tracing(self) -> None:
        """Notes that something is traced, so that the chief's present call does not count."""
        self._is_tracing = True

    def note_run(
        self, run: Run, costs: CallCosts, steps: int, function: object, is_open: bool = False
    ) -> None:
        """Adds a run of a worker, if not its first; with `is_open`, `end_step` follows."""
        name = task_name("worker", run.worker)
        with self._lock:
            if (key := (run.worker, id(function))) not in self._begun:
                self._begun.add(key)
                return
            self._close(name)
            # Calling it, its batches and its results are the link's, too.
            seconds, inside = run.ended - run.began, costs.ended - costs.began
            link = min(seconds, max(0.0, seconds - inside) + costs.seconds)
            servers: dict[str, float] = {}
            for part, took in costs.parts.items():
                if part.server is not None:
                    servers[part.server] = servers.get(part.server, 0.0) + took
            self._add(name, StepTimes(steps, seconds=seconds, link=link, servers=servers))
            self._open[name] = run, costs, steps
            if not is_open:
                self._close(name)

    def end_step(self, computed: float, updated: float) -> None:
        """Notes the end of a synchronous step: workers that were earlier have waited."""
        with self._lock:
            for name, (run, _, _) in list(self._open.items()):
                wait, server = max(0.0, computed - run.ended), updated - computed
                self._add(name, StepTimes(seconds=wait + server, wait=wait, server=server))
                self._close(name, computed)

    def note_read(self, worker: int, seconds: float) -> None:
        with self._lock:
            self._add(task_name("worker", worker), StepTimes(reads=seconds))

    def note_call(self, steps: int, began: float, read: float) -> None:
        """Adds a call of the chief that returns now, and had batches at `read`."""
        now, is_traced = time.time(), self._is_tracing
        host = began - self._returned if self._returned else 0.0
        self._is_tracing, self._returned = False, now
        if is_traced:
            return
        with self._lock:
            self._add(_CHIEF, StepTimes(steps, data=read - began, wait=now - read, host=host))
        if self._recorder is not None and self._recorder.wants(_CHIEF):
            ends = Span(trace.STEP, began, now), Span(trace.READ, began, read)
            self._recorder.add(_CHIEF, [*ends, Span(trace.WAIT, read, now)])

    def note_wait(self, began: float) -> None:
        """Adds the time since a moment, in which the chief has waited for steps."""
        with self._lock:
            if _CHIEF in self._times:
                self._add(_CHIEF, StepTimes(wait=time.time() - began))

    def _add(self, name: str, times: StepTimes) -> None:
        self._times[name] = self._times.get(name, StepTimes()).plus(times)

    def _close(self, name: str, over: float = 0.0) -> None:
        recorder, found = self._recorder, self._open.pop(name, None)
        if recorder is None or found is None or not recorder.wants(name):
            return
        run, costs, steps = found
        over = max(run.ended, over)
        lane = self._lane(name, run.began, over)
        spans, of_servers = _spans(run, costs, over, f"{name} {lane}".strip())
        spans = [span._replace(lane=lane) for span in (spans if steps == 1 else spans[:1])]
        recorder.add(name, spans, of_servers if steps == 1 else {})

    def _lane(self, name: str, began: float, ended: float) -> str:
        """Row of a worker's span, so that no two overlap in one row."""
        ends = self._lanes.setdefault(name, [])
        place = next((i for i, end in enumerate(ends) if end <= began), len(ends))
        ends[place:] = [ended, *ends[place + 1 :]]
        return str(place + 1) if place else ""


def _spans(
    run: Run, costs: CallCosts, over: float, lane: str
) -> tuple[list[Span], dict[str, list[Span]]]:
    """Spans of a worker's step by the chief's clock, and of servers for it."""
    inside = min(costs.ended - costs.began, run.ended - run.began)
    began = costs.began
    if not run.began <= began <= run.ended - inside:
        # The clock of another machine.
        began = (run.began + run.ended - inside) / 2
    ended = began + inside
    read = began + min(costs.parts.get(Part(READ), 0.0), inside)
    send = max(read, ended - costs.parts.get(Part(SEND), 0.0))
    spans = [
        Span(trace.STEP, run.began, over),
        Span(trace.READ, began, read),
        Span(trace.COMPUTE, read, send),
        Span(trace.SEND, send, ended),
        Span(trace.WAIT, run.ended, over),
    ]
    servers: dict[str, list[Span]] = {}
    for (name, server), seconds in costs.parts.items():
        if server is not None:
            first, last = (began, read) if name == READ else (send, ended)
            kind = trace.READ if name == READ else trace.UPDATE
            span = Span(kind, first, min(first + seconds, last), lane)
            servers.setdefault(server, []).append(span)
    return [span for span in spans if span.ended > span.began], servers


class Mode(NamedTuple):
    """The checked arguments; a step does without the gradients of `backup_workers`."""

    is_sync: bool
    backup_workers: int
    max_staleness: int | None

    @property
    def bound(self) -> float:
        """Maximum number of steps that a worker is ahead of the slowest one."""
        return math.inf if self.max_staleness is None else self.max_staleness

    def check_workers(self, num_workers: int) -> None:
        if self.backup_workers >= num_workers:
            raise ValueError(
                "`backup_workers` must be an integer from 0 to one less than the number of "
                f"workers: every step needs a gradient. Received: "
                f"backup_workers={self.backup_workers}, for {num_workers} worker(s)"
            )


class Attempt:
    """One try at a global step, by shares of its batch.

    The gradients of the first `wanted` shares that are admitted count. A share that comes to be
    computed again, after its worker was lost, may have been added in part before: the attempt is
    void then. Its stamp is larger than that of every attempt before.
    """

    def __init__(self, stamp: int, wanted: int) -> None:
        self.stamp, self.wanted = stamp, wanted
        self._lock = threading.Lock()
        self._admitted: set[int] = set()
        self.results: dict[int, Any] = {}
        self.is_void = False

    def admit(self, share: int) -> bool:
        """Whether to add the gradients of a share; called before any is added."""
        with self._lock:
            if share in self._admitted:
                self.is_void = True
            if self.is_over or len(self._admitted) >= self.wanted:
                return False
            self._admitted.add(share)
            return True

    def finish(self, share: int, result: Any) -> None:
        with self._lock:
            self.results[share] = result

    @property
    def is_over(self) -> bool:
        """Whether nothing that comes from now on counts."""
        return self.is_void or len(self.results) >= self.wanted


class StepAttempts:
    """The global steps of a strategy.

    `failures` counts those that an error has ended before their update, `overlapped` those that
    have begun from copies that came during the step before.
    """

    def __init__(self, backup_workers: int) -> None:
        self.backup_workers = backup_workers
        self.failures = self.overlapped = 0
        self._stamps = itertools.count(1)
        self._dropped: collections.Counter[int] = collections.Counter()
        self._steps = self._logged = 0

    def begin(self, shares: int, workers: int) -> Attempt:
        wanted = max(1, min(shares, workers - self.backup_workers))
        return Attempt(next(self._stamps), wanted)

    def count(self, attempt: Attempt, shares: int) -> None:
        self._steps += 1
        self._dropped.update(share for share in range(shares) if share not in attempt.results)

    @property
    def dropped(self) -> int:
        return self._dropped.total()

    def log_dropped(self) -> None:
        """Logs how many gradients have been dropped, if there are more than the last time."""
        if self.dropped == self._logged:
            return
        self._logged = self.dropped
        of_workers = ", ".join(f"worker-{i}: {n}" for i, n in sorted(self._dropped.items()))
        logger.info(
            "%d gradients of %d steps came late and were dropped (%s); backup_workers=%d",
            self.dropped,
            self._steps,
            of_workers,
            self.backup_workers,
        )


# Choice of `overlap_steps="auto"`: some steps are measured, the first ones at least.
#
# 2 steps | 6 measured ─► links take a part of the step ─► 3 steps | 6 measured, overlapping
#    ▲                 └► they do not: no overlap            └► the faster way stays
#    └── steps take twice or half as long as then: links, or batches, are others now


# Steps that trace functions, or that the copies of weights are not there for yet.
_FIRST, _FIRST_OVERLAPPING = 2, 3
_MEASURED = 6
# Below that part of a step, or that many bytes a step and worker, nothing is to be gained.
_PART, _BYTES = 0.25, 1 << 20
_GAIN = 0.95
# Steps that differ so much from those that decided are measured again.
_CHANGE = 2.0


class OverlapChoice:
    """Whether steps overlap at present, `is_on`, by the argument or by measured steps."""

    def __init__(self, argument: bool | None, num_workers: int, totals: TrafficTotals) -> None:
        self.is_on = bool(argument)
        self._is_automatic = self._is_open = argument is None
        self._totals, self._num_workers = totals, num_workers
        self._seconds: list[float] = []
        self._before = 0.0, 0
        self._without = 0.0
        self._decided = 0.0
        # Doubled by a choice that is made again: what keeps changing is measured seldom.
        self._patience = _MEASURED
        self._choice: bool | None = None

    def note(self, seconds: float | None) -> None:
        """Notes how long a step took; None if a worker was missing from it.

        Such a step never overlaps: what was measured before it does not count.
        """
        if not self._is_automatic:
            return
        if seconds is None:
            self._seconds.clear()
            return
        if not self._is_open:
            self._watch(seconds)
            return
        first = _FIRST_OVERLAPPING if self.is_on else _FIRST
        self._seconds.append(seconds)
        if len(self._seconds) == first:
            self._before = self._cost()
        if len(self._seconds) < first + _MEASURED:
            return
        median = statistics.median(self._seconds[first:])
        if self.is_on:
            self._decide(
                median < _GAIN * self._without,
                min(median, self._without),
                f"they take {1e3 * median:.0f} ms then, and {1e3 * self._without:.0f} ms else",
            )
            return
        waited, sent = (after - before for after, before in zip(self._cost(), self._before))
        part = waited / sum(self._seconds[first:]) / self._num_workers
        sent /= _MEASURED * self._num_workers
        if part < _PART or sent < _BYTES:
            self._decide(
                False,
                median,
                f"{part:.0%} of a step of {1e3 * median:.0f} ms is waiting for links, which carry "
                f"{sent / 1e6:.2f} MB in it",
            )
            return
        self._without, self.is_on, self._seconds = median, True, []

    def _watch(self, seconds: float) -> None:
        self._seconds.append(seconds)
        if len(self._seconds) < self._patience:
            return
        median, self._seconds = statistics.median(self._seconds), []
        if not self._decided / _CHANGE < median < self._decided * _CHANGE:
            self.is_on, self._is_open = False, True
            logger.info(
                "steps take %.0f ms, no longer %.0f: whether they overlap is measured again",
                1e3 * median,
                1e3 * self._decided,
            )

    def _decide(self, is_on: bool, seconds: float, reason: str) -> None:
        self._patience = 2 * self._patience if is_on == self._choice else _MEASURED
        self.is_on = self._choice = is_on
        self._is_open, self._seconds, self._decided = False, [], seconds
        logger.info(
            'steps %s: %s; overlap_steps="auto"', "overlap" if is_on else "do not overlap", reason
        )

    def _cost(self) -> tuple[float, int]:
        return self._totals.seconds, sum(one.wire_bytes for one in self._totals.traffic())


@dataclasses.dataclass(eq=False)
class StepContext:
    """The objects that steps are made with; parts take this instead of the strategy.

    `functions` are those of models with a method `drain`, whose steps may be under way;
    `steps_by_worker` is of the present epoch.
    """

    strategy: tf.distribute.Strategy
    extended: ParameterServerExtended
    engine: DistributedEngine
    num_workers: int
    mode: Mode
    overlap: OverlapChoice
    scheduler: Scheduler
    attempts: StepAttempts
    totals: TrafficTotals
    progress: Progress
    times: WorkerTimes = dataclasses.field(init=False)
    updating: WorkerUpdates = dataclasses.field(init=False)
    steps_by_worker: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )
    functions: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.times = WorkerTimes(self.progress)

    def server_addresses(self) -> list[str]:
        """Addresses of the parameter servers, in order; the resolver is asked."""
        return self.strategy.cluster_resolver.cluster_spec().as_dict()["ps"]

    def push(
        self, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        # Sums begin to be applied with the first that are whole.
        in_turn = self.overlap.is_on
        return self.extended.pushes.send(
            grads,
            variables,
            lambda: tf.convert_to_tensor(optimizer.iterations),
            optimizer,
            in_turn=in_turn,
        )

    def drain(self, but: Any = None) -> None:
        """Waits for the steps of all functions, and has them write what they have counted."""
        for function in list(self.functions):
            if function is not but:
                function.drain()
