"""Requests to the launcher of a running job, by files in the job's folder."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
import uuid
from collections.abc import Callable

from keras_psplus.cluster.monitor.json_log import encode

_REQUEST, _ANSWER = ".request", ".answer"
_POLL_SECONDS = 0.05


class RequestError(Exception):
    """The launcher has refused a request, or does not answer."""


def ask(folder: pathlib.Path, what: str, timeout: float) -> str:
    """Asks the launcher of a job for something.

    Args:
        folder: The job's folder.
        what: Name of the request.
        timeout: Seconds to wait for the answer.

    Returns:
        The answer.

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
        folder: The job's folder.
        what: Name of the requests.
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
            own = request.with_suffix(f".{os.getpid()}")
            own.write_text(encode([said, error]))
            os.replace(own, request.with_suffix(_ANSWER))
