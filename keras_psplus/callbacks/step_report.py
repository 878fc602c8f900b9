"""Progress of training, reported to processes outside its terminal."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, NamedTuple

import keras

from keras_psplus.cluster.monitor import task_report
from keras_psplus.cluster.monitor.goodput import EVALUATION
from keras_psplus.cluster.monitor.step_times import StepTimes
from keras_psplus.cluster.monitor.task_report import TaskReport
from keras_psplus.communication import Communication, Totals

# Between two lines of one task.
_SECONDS = 1.0


class StepReport(keras.callbacks.Callback):
    """Writes a summary of `fit`'s steps about once a second and after each epoch.

    `add` adds it to a list of callbacks where the launcher has asked for it.
    """

    # Keras then does not hold up the next step for it. Batches may end on several threads.
    async_safe = True

    def __init__(self, report: TaskReport) -> None:
        super().__init__()
        self._report, self._time_sheet = report, report.time_sheet
        self._fits = 0
        self._evaluation = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._communication: Communication | None = None
        self._progress: Any = None
        self._is_training = False
        self._own_steps = self._epoch = self._batch = self._counted = 0
        self._loss: float | None = None
        self._since = _Moment(0.0, 0, Totals(), {})

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        strategy = getattr(self.model, "distribute_strategy", None)
        communication = getattr(strategy, "communication", None)
        self._communication = communication if isinstance(communication, Communication) else None
        self._progress = getattr(strategy, "progress", None)
        self._is_training = True
        self._fits += 1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._batch, self._loss = epoch + 1, 0, None
        self._since = self._moment()
        self._counted = self._since.step
        if self._time_sheet is not None:
            self._time_sheet.begin_epoch(self._fits, epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        with self._lock:
            self._own_steps += max(0, batch + 1 - self._batch)
            self._batch = max(self._batch, batch + 1)
            self._loss = (logs or {}).get("loss")
            if self._time_sheet is not None:
                steps, self._counted = self._steps - self._counted, self._steps
                self._time_sheet.end_batches(self._batch, steps)
            if time.perf_counter() - self._since.seconds >= _SECONDS:
                self._summarise()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Validation is about to begin, whose time is not that of the steps.
        if self._is_training:
            with self._lock:
                self._summarise()
                if self._time_sheet is not None:
                    self._time_sheet.pause()
                    self._evaluation.enter_context(self._time_sheet.spending(EVALUATION))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._evaluation.close()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        with self._lock:
            self._loss = (logs or {}).get("loss", self._loss)
            self._summarise()
            if self._time_sheet is not None:
                self._time_sheet.pause()
            strategy = getattr(self.model, "distribute_strategy", None)
            by_worker = getattr(strategy, "steps_by_worker", None)
            self._report.epoch_end(self._steps, epoch + 1, dict(logs or {}), by_worker)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._is_training = False

    @property
    def _steps(self) -> int:
        """Training steps of this process, as the stall inspector counts them."""
        return self._own_steps if self._progress is None else self._progress.steps

    def _summarise(self) -> None:
        now, since = self._moment(), self._since
        steps = now.step - since.step
        if steps <= 0:
            return
        self._since, spent = now, now.totals - since.totals
        none = StepTimes()
        self._report.steps(
            {name: each.since(since.times.get(name, none)) for name, each in now.times.items()},
            step=now.step,
            epoch=self._epoch,
            batch=self._batch,
            steps=steps,
            loss=_number(self._loss),
            ms=round((now.seconds - since.seconds) / steps * 1e3, 3),
            bytes_sent=round(spent.sent_bytes / steps),
            # What is summed by all-reduce is counted where it is sent.
            bytes_received=round(spent.pulled_bytes / steps) if now.totals.pulled_bytes else None,
            wait_ms=round(spent.seconds / steps * 1e3, 3),
        )

    def _moment(self) -> _Moment:
        return _Moment(
            time.perf_counter(),
            self._steps,
            Totals.of(self._communication),
            {} if self._progress is None else self._progress.times(),
        )


class _Moment(NamedTuple):
    """Totals of the process at a moment."""

    seconds: float
    step: int
    totals: Totals
    times: dict[str, StepTimes]


def add(callbacks: keras.callbacks.CallbackList) -> None:
    """Adds a `StepReport` to a list of callbacks, if the launcher has asked for one."""
    report = task_report.current()
    if report is not None and not any(isinstance(c, StepReport) for c in callbacks.callbacks):
        # What others do at an epoch's end is no part of its steps' time.
        callbacks.callbacks.insert(0, StepReport(report))


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
