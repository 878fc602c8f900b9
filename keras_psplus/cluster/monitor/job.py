"""A local job of this user: its JSON log, folder, record, and requests to it."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import pathlib
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from keras_psplus import process_identity
from keras_psplus.cluster.console import warn
from keras_psplus.cluster.monitor import goodput, trace
from keras_psplus.cluster.monitor.goodput import Goodput
from keras_psplus.files.replace import replace
from keras_psplus.log import logger

# JSON-lines file to which the launcher and all tasks of a job append.

JSON_LOG_VARIABLE = "KERAS_PSPLUS_JSON_LOG"


class JsonLog:
    """Appends whole lines, each by one system call: lines of several processes do not mix.

    A line has `timestamp` (UTC, ISO 8601), `event` and what belongs to the event.

    Example:

    ```python
    JsonLog("job.jsonl").append("task_ended", task="worker-1", exit_code=1)
    ```

    Args:
        path: Path of the file, on a local disk. It is opened for each line, so that it may be moved
            away meanwhile.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)
        self._has_failed = False

    @property
    def path(self) -> str:
        return self._path

    def check(self) -> None:
        """Makes the file if it is not there."""
        os.close(self._open())

    def append(self, event: str, **fields: Any) -> None:
        """Appends a line; a file that cannot be written stops nobody.

        Args:
            **fields: What belongs to it. Floats that are not finite become null.
        """
        line = encode({"timestamp": now(), "event": event, **fields}) + "\n"
        try:
            handle = self._open()
            try:
                os.write(handle, line.encode())
            finally:
                os.close(handle)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("cannot write %s (%s); the job goes on", self._path, error)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o666)


def now() -> str:
    """The time as lines have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def encode(value: Any) -> str:
    """JSON of a value, with null for what JSON has no numbers for."""
    return json.dumps(_finite(value), allow_nan=False, default=_of_other)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _of_other(value: Any) -> Any:
    """Converts a number of NumPy's or TensorFlow's to a float, anything else to text."""
    try:
        return _finite(float(value))
    except (TypeError, ValueError):
        return str(value)


# A local job of this user: its folder, its record, and requests to it.


# A folder for each local job of this user, from which `keras-psplus status` reads.
#
# The launcher writes `job.json` there, and each task its own file. Folders lie below one that
# belongs to this user alone. The launcher removes its own at the end; one that was killed leaves it
# behind, for the next one to remove.

FOLDER_VARIABLE = "KERAS_PSPLUS_JOB_DIR"
_JOB, _FAILED, _SERVES = "job.json", ".failed", ".serves"


def root() -> pathlib.Path:
    """The folder of this user's jobs, which need not exist."""
    return pathlib.Path(tempfile.gettempdir()) / f"keras_psplus_jobs_{os.getuid()}"


def make() -> pathlib.Path:
    """Makes a folder for a job of this process."""
    above = root()
    with contextlib.suppress(FileExistsError):
        above.mkdir(mode=0o700)
    check(above)
    _clear(above)
    return pathlib.Path(
        tempfile.mkdtemp(prefix=f"{os.getpid()}-{process_identity.machine()}-", dir=above)
    )


def _clear(above: pathlib.Path) -> None:
    """Removes what launchers have left that were killed."""
    with contextlib.suppress(OSError):
        for folder in above.iterdir():
            # Another container, which may have this folder too, has process ids of its own.
            pid, _, others = folder.name.partition("-")
            if not pid.isdigit() or others.partition("-")[0] != process_identity.machine():
                continue
            birth = (_read(folder / _JOB) or {}).get("birth")
            if process_identity.state_of(int(pid), birth) == process_identity.ENDED:
                remove(folder)


def check(above: pathlib.Path) -> None:
    """Checks that a folder is this user's alone."""
    found = os.lstat(above)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o022:
        raise PermissionError(
            f"{above} is not a folder that this user alone can write to. Remove it, or set TMPDIR. "
            f"Received: owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"
        )


def is_running(job: dict[str, Any]) -> bool:
    """Whether a job's launcher runs, by what `read_all` has of it."""
    return process_identity.state_of(job["pid"], job["birth"]) != process_identity.ENDED


def write_job(folder: pathlib.Path, job: dict[str, Any]) -> None:
    """Writes what the launcher knows of its job."""
    _replace(folder / _JOB, job)


def write_task(folder: pathlib.Path, name: str, state: dict[str, Any]) -> None:
    """Writes what a task says of itself."""
    _replace(folder / f"{name}.json", state)


def account_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Path of a task's account of its time, as of `goodput.TimeSheet`."""
    return folder / f"{name}.account"


def mark_failed(folder: pathlib.Path, name: str) -> None:
    """Marks a task as failed: its error has been logged, and it may be ended."""
    (folder / f"{name}{_FAILED}").touch()


def have_failed(folder: pathlib.Path, names: Iterable[str]) -> bool:
    """Whether all of some tasks have noted that."""
    return all((folder / f"{name}{_FAILED}").exists() for name in names)


def mark_serving(folder: pathlib.Path, name: str) -> None:
    """Marks a task as serving a chief, without state or messages to save."""
    (folder / f"{name}{_SERVES}").touch()


def is_serving(folder: pathlib.Path, name: str) -> bool:
    return (folder / f"{name}{_SERVES}").exists()


def forget_marks(folder: pathlib.Path) -> None:
    """Forgets what tasks have noted, as they are about to be started again."""
    for suffix in (_FAILED, _SERVES):
        for path in folder.glob(f"*{suffix}"):
            path.unlink(missing_ok=True)


def read_all() -> list[tuple[pathlib.Path, dict[str, Any], dict[str, dict[str, Any]]]]:
    """Reads the jobs of this user.

    Returns:
        List of each one's folder, what its launcher says, and a dict from tasks to what they say.
    """
    above = root()
    if not os.path.lexists(above):
        return []
    check(above)
    found = []
    for folder in sorted(above.iterdir()):
        job = _read(folder / _JOB)
        if job is not None:  # Else it is being made, or removed.
            tasks = {name: _read(folder / f"{name}.json") or {} for name in job.get("tasks", ())}
            found.append((folder, job, tasks))
    return sorted(found, key=lambda each: each[1].get("began", ""))


def remove(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _replace(path: pathlib.Path, value: Any) -> None:
    # Steps do not wait for a disk: the folder ends with its launcher.
    replace(path, encode(value).encode(), is_durable=False)


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


# The launcher's record of a running job, for `status` and the JSON log.


class JobRecord:
    """Notes what becomes of a job and its tasks.

    A context: at its beginning the job's folder is made, at its end it is removed. A folder that
    cannot be made or written stops nobody.
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
            "birth": process_identity.birth_of(os.getpid()),
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
            self._folder = make()
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
            remove(self._folder)

    @property
    def folder(self) -> pathlib.Path | None:
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
        """Notes that all tasks are about to be started."""
        self._job["restart"] = restart
        if self._folder is not None:
            forget_marks(self._folder)
        if restart:
            self._note_account()
            self._append("job_restarted", restart=restart)

    def task_started(self, name: str, pid: int, restart: int) -> None:
        """Notes that a task was started."""
        task = {
            "pid": pid,
            "birth": process_identity.birth_of(pid),
            "began": now(),
            "exit_code": None,
        }
        with self._lock:
            is_again = name in self._job["tasks"]
            self._job["tasks"][name] = task
        event = "task_restarted" if is_again else "task_started"
        self._append(event, task=name, pid=pid, restart=restart)
        self._write()

    def have_failed(self, names: Iterable[str]) -> bool:
        """Whether all of some tasks have failed and said why, though they have not ended."""
        return self._folder is not None and have_failed(self._folder, names)

    def is_serving(self, name: str) -> bool:
        return self._folder is not None and is_serving(self._folder, name)

    def task_ended(self, name: str, code: int) -> None:
        with self._lock:
            self._job["tasks"][name]["exit_code"] = code
            self._last_end = time.time()
        self._append("task_ended", task=name, exit_code=code)
        self._write()

    def job_ended(self, code: int, log: Callable[[str], None]) -> None:
        """Notes the end of the job."""
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
        if self._folder is not None:
            account = goodput.read(account_of(self._folder, self._leads))
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
                write_job(self._folder, self._job)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(OSError):
                    warn(f"`keras-psplus status` does not show how this job goes on: {error}")


# Requests to the launcher of a running job, by files in the job's folder.

_REQUEST, _ANSWER = ".request", ".answer"
_POLL_SECONDS = 0.05


class RequestError(Exception):
    """The launcher has refused a request, or does not answer."""


def ask(folder: pathlib.Path, what: str, timeout: float) -> str:
    """Asks the launcher of a job for something.

    Raises:
        RequestError: If it is refused, or there is no answer.
        OSError: If the folder cannot be written.
    """
    request = folder / f"{what}-{uuid.uuid4().hex}{_REQUEST}"
    answer = request.with_suffix(_ANSWER)
    request.touch()
    deadline = time.monotonic() + timeout
    try:
        while not answer.exists():
            if time.monotonic() >= deadline or not folder.exists():
                raise RequestError(
                    f"the job's launcher does not answer within {timeout:g} s: it is about to end, "
                    f"or hangs. Received: {folder}"
                )
            time.sleep(_POLL_SECONDS)
        said, error = json.loads(answer.read_text())
    finally:
        for path in (request, answer):
            path.unlink(missing_ok=True)
    if error is not None:
        raise RequestError(error)
    return str(said)


def answer(folder: pathlib.Path, what: str, function: Callable[[], str]) -> None:
    """Answers the requests of a name that wait.

    Args:
        function: Called for each, returns the answer or raises `RequestError`.
    """
    for request in sorted(folder.glob(f"{what}-*{_REQUEST}")):
        said, error = "", None
        with contextlib.suppress(OSError):
            request.unlink()  # Else it would be answered once more.
            try:
                said = function()
            except RequestError as refused:
                error = str(refused)
            _replace(request.with_suffix(_ANSWER), [said, error])
