"""The launcher's record of a running job, for `status` and the JSON log."""

import contextlib
import json
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from keras_psplus.cluster.monitor import goodput, job_folder, trace
from keras_psplus.cluster.monitor.goodput import Goodput
from keras_psplus.cluster.monitor.job_folder import FOLDER_VARIABLE
from keras_psplus.cluster.monitor.json_log import JSON_LOG_VARIABLE, JsonLog, now
from keras_psplus.cluster.output.console import warn
from keras_psplus.cluster.process import process_state


class JobRecord:
    """Notes what becomes of a job and its tasks.

    A context: at its beginning the job's folder is made, at its end it is removed. A folder that
    cannot be made or written stops nobody.

    Args:
        command: The script and its arguments.
        layout: Numbers of tasks by job type.
        log_dir: Folder of the tasks' logs.
        json_log: A `JsonLog`, or None.
        trace_to: Path of a trace and its number of steps, or None.
        min_workers: How many of the workers are always there, if others come and go; else None.
    """

    def __init__(
        self,
        command: Sequence[str],
        layout: Mapping[str, int],
        log_dir: pathlib.Path,
        json_log: JsonLog | None = None,
        trace_to: tuple[pathlib.Path, int] | None = None,
        min_workers: int | None = None,
    ) -> None:
        self._log, self._trace_to = json_log, trace_to
        self._parts: tempfile.TemporaryDirectory[str] | None = None
        self._folder: pathlib.Path | None = None
        self._lock = threading.Lock()
        self._has_failed = False
        self._goodput, self._last_end = Goodput(time.time()), time.time()
        self._has_trained = False
        self._leads = "chief-0" if layout.get("chief") else "worker-0"
        self._job: dict[str, Any] = {
            "pid": os.getpid(),
            "birth": process_state.birth_of(os.getpid()),
            "began": now(),
            "command": list(command),
            "layout": {job: int(count) for job, count in layout.items() if count},
            "min_workers": min_workers,
            "log_dir": os.path.abspath(log_dir),
            "json_log": None if json_log is None else json_log.path,
            "restart": 0,
            "tasks": {},
        }

    def __enter__(self) -> Self:
        try:
            self._folder = job_folder.make()
        except OSError as error:
            warn(f"`keras-psplus status` will not show this job: {error}")
        if self._trace_to is not None:
            try:
                self._parts = tempfile.TemporaryDirectory(prefix="keras_psplus_trace_")
            except OSError as error:
                warn(f"the trace cannot be written: {error}")
        self._write()
        told = ("command", "layout", "log_dir", "pid")
        self._append("job_started", **{name: self._job[name] for name in told})
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            job_folder.remove(self._folder)

    @property
    def folder(self) -> pathlib.Path | None:
        """The job's folder, or None if there is none."""
        return self._folder

    @property
    def environment(self) -> dict[str, str]:
        """Dict of the variables by which tasks know where to write."""
        variables = {}
        if self._folder is not None:
            variables[FOLDER_VARIABLE] = str(self._folder)
        if self._log is not None:
            variables[JSON_LOG_VARIABLE] = self._log.path
        if self._trace_to is not None and self._parts is not None:
            variables[trace.TRACE_VARIABLE] = self._parts.name
            variables[trace.TRACE_STEPS_VARIABLE] = str(self._trace_to[1])
        return variables

    def begin_attempt(self, restart: int) -> None:
        """Notes that all tasks are about to be started.

        Args:
            restart: How often they were before.
        """
        self._job["restart"] = restart
        if self._folder is not None:
            job_folder.forget_marks(self._folder)
        if restart:
            self._note_account()
            self._append("job_restarted", restart=restart)

    def task_started(self, name: str, pid: int, restart: int) -> None:
        """Notes that a task was started.

        Args:
            name: Its name.
            pid: Its process id.
            restart: How often tasks of the job, or all of it, were started again before.
        """
        task = {"pid": pid, "birth": process_state.birth_of(pid), "began": now(), "exit_code": None}
        with self._lock:
            is_again = name in self._job["tasks"]
            self._job["tasks"][name] = task
        event = "task_restarted" if is_again else "task_started"
        self._append(event, task=name, pid=pid, restart=restart)
        self._write()

    def have_failed(self, names: Iterable[str]) -> bool:
        """Whether all of some tasks have failed and said why, though they have not ended."""
        return self._folder is not None and job_folder.have_failed(self._folder, names)

    def is_serving(self, name: str) -> bool:
        """Whether a task only serves a chief."""
        return self._folder is not None and job_folder.is_serving(self._folder, name)

    def task_ended(self, name: str, code: int) -> None:
        """Records a task's end: an exit code, or a signal if it is negative."""
        with self._lock:
            self._job["tasks"][name]["exit_code"] = code
            self._last_end = time.time()
        self._append("task_ended", task=name, exit_code=code)
        self._write()

    def job_ended(self, code: int, log: Callable[[str], None]) -> None:
        """Notes the end of the job.

        Args:
            code: Its exit code.
            log: Function that takes a line on its goodput, if it has trained.
        """
        if self._trace_to is not None and self._parts is not None:
            try:
                merged = trace.merge(pathlib.Path(self._parts.name))
                self._trace_to[0].write_text(json.dumps(merged))
            except OSError as error:
                warn(f"the trace cannot be written: {error}")
            self._parts.cleanup()
        self._note_account()
        summary = self._goodput.summary(time.time()) if self._has_trained else None
        self._append("job_ended", exit_code=code, goodput=summary)
        if summary is not None:
            log(goodput.describe(summary))

    def _note_account(self) -> None:
        """Adds the start that has ended to the job's goodput."""
        if self._folder is not None:
            account = goodput.read(job_folder.account_of(self._folder, self._leads))
            self._has_trained |= account is not None
            self._goodput.add(account, self._last_end)

    def _append(self, event: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.append(event, **fields)

    def _write(self) -> None:
        if self._folder is None:
            return
        try:
            with self._lock:
                job_folder.write_job(self._folder, self._job)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(OSError):
                    warn(f"`keras-psplus status` does not show how this job goes on: {error}")
