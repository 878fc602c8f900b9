"""Exit of a chief whose job has lost a task that holds variables.

Nobody else runs the script there, so that there is no peer to tell and to wait for, as a worker
has under all-reduce (`failure.py`).
"""

import atexit
import os
import re
import sys
from typing import NoReturn

from keras_psplus.log import logger

_has_failed = False


def install_exit_hook() -> None:
    """Ends this process without TensorFlow's own end if a part of the cluster was lost."""
    atexit.register(_exit_if_failed)


def mark_failed() -> None:
    """Notes that a part of the cluster was lost."""
    global _has_failed
    _has_failed = True


def has_failed() -> bool:
    """Whether a part of the cluster was lost."""
    return _has_failed


def relevant_line(error: Exception) -> str:
    """The line of a TensorFlow error that says why a task could not be reached."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    relevant = [
        line for line in lines if re.search(r"refused|reset|closed|UNAVAILABLE|abort", line)
    ]
    return (relevant or lines)[0][:300]


def exit_now() -> NoReturn:
    """Ends this process with exit code 1, without TensorFlow's own end."""
    logger.error("the chief ends with exit code 1, because the job has failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _exit_if_failed() -> None:
    if _has_failed:
        # TensorFlow would talk to the lost tasks once more about all that it had there, and may
        # wait.
        exit_now()
