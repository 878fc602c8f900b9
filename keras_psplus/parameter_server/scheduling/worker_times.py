"""Times of steps by task, added up on the chief, which sends nothing for them.

chief    read ─┬─ wait ─────────────────────────────────┬─ update (`mode="sync"`) ─ callbacks
worker         └─ call ─ read ─ compute ─ send ─ result ─┘
                         [ timed in its graph ]
"""

from __future__ import annotations

import threading
import time

from keras_psplus.cluster.config import task_name
from keras_psplus.cluster.monitor import trace
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.monitor.step_times import StepTimes
from keras_psplus.cluster.monitor.trace import Span
from keras_psplus.parameter_server.scheduling.queue import Run
from keras_psplus.parameter_server.tracing.traffic import READ, SEND, CallCosts, Part

_CHIEF = task_name("chief", 0)


class WorkerTimes:
    """Seconds of training steps by task, added up on the chief for its progress."""

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
        """Adds a run of a worker; its first one of a function does not count.

        With `is_open`, `end_step` is called once the step is over for all workers.
        """
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
        """Adds seconds in which a worker has read batches beside its steps."""
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
        """Records a run, once nothing of its step follows."""
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
