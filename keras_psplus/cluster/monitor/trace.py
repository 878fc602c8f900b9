"""Chrome trace of some training steps of each task, for Perfetto and chrome://tracing.

Tasks of the launcher share the machine's clock (`time.time()`, of a microsecond) and each leave a
file in a folder; the launcher merges them. Elsewhere, each process writes a trace of its own.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import json
import os
import pathlib
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from keras_psplus.cluster.config import read_task_config
from keras_psplus.log import logger

TRACE_VARIABLE, TRACE_STEPS_VARIABLE = "KERAS_PSPLUS_TRACE", "KERAS_PSPLUS_TRACE_STEPS"
STEPS = 20
STEP, READ, COMPUTE, SEND, WAIT, UPDATE = "step", "read", "compute", "send", "wait", "update"
RECEIVE = "receive"
# Sending and waiting for others together, until the traces of all workers are compared.
COLLECTIVE = "collective"
_WARM_UP = 3  # steps, of which the first is traced by TensorFlow


class Span(NamedTuple):
    """Something that a task does.

    Attributes:
        name: What it is, such as `READ`.
        began, ended: When, in seconds of `time.time()`.
        lane: For whom, where a task does several things at a time.
    """

    name: str
    began: float
    ended: float
    lane: str = ""


class TraceRecorder:
    """Keeps the spans of some steps of tasks, and writes them to a file.

    Attributes:
        collective: Variable of a step's graph: when the last sum of gradients began and ended.
    """

    def __init__(self, path: pathlib.Path, task: str, steps: int = STEPS) -> None:
        self._path = path / f"{task}.json" if path.is_dir() else path
        self._is_part = path.is_dir()
        self._steps, self._seen = steps, collections.Counter[str]()
        self._spans: dict[str, list[tuple[int, Span]]] = {}
        self._lock = threading.Lock()
        self.collective: Any = None
        atexit.register(self._write)

    def wants(self, task: str) -> bool:
        """Whether spans of the next step of a task are to be recorded."""
        return self._seen[task] < _WARM_UP + self._steps

    def add(
        self, task: str, spans: Iterable[Span], others: Mapping[str, Iterable[Span]] | None = None
    ) -> None:
        """Adds a step."""
        with self._lock:
            self._seen[task] += 1
            number = self._seen[task] - _WARM_UP
            if 0 < number <= self._steps:
                for name, each in {task: spans, **(others or {})}.items():
                    self._spans.setdefault(name, []).extend((number, span) for span in each)
        if number == self._steps:
            self._write()

    def _write(self) -> None:
        with self._lock:
            spans = {task: list(each) for task, each in self._spans.items()}
        if not spans:
            return  # what an earlier start of the job has left is better
        text = json.dumps(spans if self._is_part else to_chrome(spans))
        try:
            self._path.write_text(text)
        except OSError as error:
            logger.warning("cannot write %s (%s); the job goes on", self._path, error)


def merge(folder: pathlib.Path) -> dict[str, Any]:
    """Merges what the tasks of a job have left in a folder."""
    spans: dict[str, list[tuple[int, Span]]] = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):  # of a task that was killed
            for task, found in json.loads(path.read_text()).items():
                spans.setdefault(task, []).extend((number, Span(*span)) for number, span in found)
    return to_chrome(spans)


def to_chrome(spans: dict[str, list[tuple[int, Span]]]) -> dict[str, Any]:
    """A Chrome trace of spans, by task: numbers of steps and `Span`s."""
    arrivals: dict[int, float] = {}
    for each in spans.values():
        for number, span in each:
            if span.name == COLLECTIVE:
                arrivals[number] = max(arrivals.get(number, 0.0), span.began)
    origin = min((s.began for each in spans.values() for _, s in each), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, task in enumerate(sorted(spans)):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": task}})
        lanes = sorted({span.lane for _, span in spans[task]})
        for tid, lane in enumerate(lanes):
            names = {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name"}
            events.append({**names, "args": {"name": lane or "training"}})
        for number, span in spans[task]:
            for part in _parts(span, arrivals.get(number, 0.0)):
                began, ended = ((at - origin) * 1e6 for at in (part.began, part.ended))
                place = {"ph": "X", "pid": pid, "tid": lanes.index(part.lane), "cat": "training"}
                times = {"ts": round(began, 1), "dur": round(max(0.0, ended - began), 1)}
                events.append({**place, "name": part.name, **times, "args": {"step": number}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _parts(span: Span, last_arrival: float) -> list[Span]:
    """A span, or of a collective the wait for the last worker and the sending."""
    if span.name != COLLECTIVE:
        return [span]
    met = min(max(last_arrival, span.began), span.ended)
    parts = [span._replace(name=WAIT, ended=met), span._replace(name=SEND, began=met)]
    return [part for part in parts if part.ended > part.began]


@functools.cache
def current() -> TraceRecorder | None:
    """The `TraceRecorder` of this process, or None if nobody has asked for one."""
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return None
    task, steps = read_task_config(), os.environ.get(TRACE_STEPS_VARIABLE)
    name = task.name if task else "process"
    return TraceRecorder(pathlib.Path(path), name, int(steps) if steps else STEPS)
