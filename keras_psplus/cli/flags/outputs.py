"""Output paths of `run`, checked before anything is started."""

import pathlib
import tempfile

from absl import flags

from keras_psplus.cli.flags import parsing
from keras_psplus.cluster.monitor.json_log import JsonLog
from keras_psplus.cluster.monitor.trace import STEPS as TRACE_STEPS


def log_dir(folder: str | None) -> pathlib.Path:
    """Creates the folder for the tasks' logs, so that errors show at once.

    Raises:
        UsageError: If it cannot be written.
    """
    try:
        if not folder:
            return pathlib.Path(tempfile.mkdtemp(prefix="keras_psplus_"))
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise parsing.UsageError(
            f"the tasks' logs cannot be written: {error}. Name another folder with --log_dir. "
            f"Received: --log_dir={folder or ''}"
        ) from None


def json_log(path: str | None) -> JsonLog | None:
    """Creates the JSON log, if one is wanted, so that errors show at once.

    Raises:
        UsageError: If it cannot be written.
    """
    if path is None:
        return None
    log = JsonLog(path)
    try:
        if not path:
            raise FileNotFoundError("it has no name")
        log.check()
    except OSError as error:
        raise parsing.UsageError(
            f"the JSON log cannot be written: {error}. Name a file in a folder that is there. "
            f"Received: --json_log={path}"
        ) from None
    return log


def define(values: flags.FlagValues) -> None:
    """Defines `--json_log`, `--trace` and `--trace_steps`."""
    flags.DEFINE_string(
        "json_log",
        None,
        "File to which a line of JSON is appended for each summary of training steps (about one a "
        "second from each task), and for each start and end of a task, stall and fault.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "trace",
        None,
        "File for a Chrome trace of some training steps of all tasks, which Perfetto opens.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "trace_steps",
        TRACE_STEPS,
        "Number of steps of each task in the trace, after three of warm-up.",
        lower_bound=1,
        flag_values=values,
    )


def trace(path: str | None, steps: int) -> tuple[pathlib.Path, int] | None:
    """Creates the file of a trace, so that errors show at once.

    Raises:
        UsageError: If it cannot be written.
    """
    if path is None:
        return None
    try:
        with open(path, "a"):
            return pathlib.Path(path), steps
    except OSError as error:
        raise parsing.UsageError(
            f"the trace cannot be written: {error}. Name a file in a folder that is there. "
            f"Received: --trace={path}"
        ) from None
