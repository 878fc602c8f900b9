"""Output paths of `run`, checked before anything is started."""

import pathlib
import tempfile

from keras_psplus.cli.flags import parsing
from keras_psplus.cluster.monitor.json_log import JsonLog


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
