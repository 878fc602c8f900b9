"""JSON-lines file to which the launcher and all tasks of a job append."""

import datetime
import json
import math
import os
from typing import Any

from keras_psplus.log import logger

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
        """The file's absolute path."""
        return self._path

    def check(self) -> None:
        """Makes the file if it is not there.

        Raises:
            OSError: If it cannot be written.
        """
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
