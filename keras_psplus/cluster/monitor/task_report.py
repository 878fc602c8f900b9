"""Reports of a task while it trains, for `keras-psplus status` and the JSON log."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

from keras_psplus.cluster.config import read_task_config
from keras_psplus.cluster.environment import RESTART_VARIABLE
from keras_psplus.cluster.monitor import job, step_times
from keras_psplus.cluster.monitor.goodput import TimeSheet
from keras_psplus.cluster.monitor.job import JSON_LOG_VARIABLE, JsonLog, now
from keras_psplus.cluster.monitor.step_times import Slowest, StepTimes
from keras_psplus.log import logger


class TaskReport:
    """Writer of a task's reports: a state file, and lines in the JSON log."""

    def __init__(
        self, name: str, folder: pathlib.Path | None, log: JsonLog | None, restart: int = 0
    ) -> None:
        self._name, self._folder, self._log, self._restart = name, folder, log, restart
        self._state: dict[str, Any] = {"task": name}
        # The thread that trains, and the stall inspector's.
        self._lock = threading.Lock()

    @functools.cached_property
    def time_sheet(self) -> TimeSheet | None:
        """Account of this process's time; None without a folder of the job."""
        if self._folder is None:
            return None
        try:
            return TimeSheet(job.account_of(self._folder, self._name))
        except OSError as error:
            logger.debug("cannot write into %s: %s", self._folder, error)
            return None

    def steps(self, times: Mapping[str, StepTimes], **figures: Any) -> None:
        """Says how far training is."""
        parts = {name: each.per_step().to_json() for name, each in times.items() if each.steps}
        self._append("steps", **figures, parts=parts)
        packed = {name: each.packed() for name, each in times.items()}
        self._update(steps=figures, times=packed)

    def epoch_end(
        self, step: int, epoch: int, logs: dict[str, Any], steps_by_worker: list[int] | None = None
    ) -> None:
        """Says that an epoch is over."""
        more = {} if steps_by_worker is None else {"steps_by_worker": steps_by_worker}
        self._append("epoch_end", step=step, epoch=epoch, loss=logs.get("loss"), logs=logs, **more)

    def step_times(
        self, epoch: int, times: Mapping[str, StepTimes], slowest: Slowest | None
    ) -> None:
        """Says what the steps of an epoch went to, for all tasks."""
        found = None if slowest is None else slowest.to_json()
        tasks = {name: each.to_json() for name, each in times.items()}
        servers = step_times.by_server(times)
        self._append("step_times", epoch=epoch, tasks=tasks, servers_ms=servers, slowest=found)

    def evaluation(self, checkpoint: str, step: int, logs: dict[str, Any]) -> None:
        """Says what an evaluator has found."""
        loss = logs.get("loss")
        self._append("evaluation", step=step, loss=loss, checkpoint=checkpoint, logs=logs)
        self._update(steps={"step": step, "loss": loss})

    def failed(self) -> None:
        """Says that it has failed and said why, and stays for the others' sake alone."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                job.mark_failed(self._folder, self._name)

    def serves(self) -> None:
        """Says that it only serves a chief."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                job.mark_serving(self._folder, self._name)

    def stall(self, what: str, waited: float, described: str) -> None:
        """Says that this task has waited for long."""
        seconds = round(waited, 1)
        self._append("stall", seconds=seconds, message=f"{what} waits for {described}")
        stall = {"timestamp": now(), "seconds": seconds, "message": described, "is_over": False}
        self._update(stall=stall)

    def stall_over(self, what: str, waited: float) -> None:
        """Says that it goes on, after some seconds."""
        seconds = round(waited, 1)
        self._append("stall_over", seconds=seconds, message=what)
        self._update(stall={**self._state.get("stall", {}), "seconds": seconds, "is_over": True})

    def _append(self, event: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.append(event, task=self._name, restart=self._restart, **fields)

    def _update(self, **changes: Any) -> None:
        if self._folder is None:
            return
        with self._lock:
            self._state.update(changes, timestamp=now())
            try:
                job.write_task(self._folder, self._name, self._state)
            except OSError as error:
                # A launcher that has been killed, or a full disk: training goes on without.
                logger.debug("cannot write into %s: %s", self._folder, error)


def is_wanted() -> bool:
    """Whether somebody has asked for reports of this process, as the launcher does."""
    return any(os.environ.get(name) for name in (job.FOLDER_VARIABLE, JSON_LOG_VARIABLE))


def spending(kind: str) -> contextlib.AbstractContextManager[None]:
    """Context of something else than steps, in the account of this process."""
    report = current()
    time_sheet = None if report is None else report.time_sheet
    return contextlib.nullcontext() if time_sheet is None else time_sheet.spending(kind)


@functools.cache
def current() -> TaskReport | None:
    """The `TaskReport` of this process, or None if nobody has asked for one.

    The launcher does, by environment variables.
    """
    if not is_wanted():
        return None
    folder, log = os.environ.get(job.FOLDER_VARIABLE), os.environ.get(JSON_LOG_VARIABLE)
    task = read_task_config()
    return TaskReport(
        task.name if task else "process",
        pathlib.Path(folder) if folder else None,
        JsonLog(log) if log else None,
        int(os.environ.get(RESTART_VARIABLE) or 0),
    )
