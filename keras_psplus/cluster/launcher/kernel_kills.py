"""Processes that the kernel has ended for want of memory, which leave no word themselves."""

import pathlib
import signal

from keras_psplus.cluster.launcher.results import OutOfMemory

_STATISTICS = pathlib.Path("/proc/vmstat")
_FIELD = "oom_kill "


class KernelKills:
    """Tells ends for want of memory from others by SIGKILL, as far as Linux tells.

    The kernel counts such ends, those by the limit of a container included, and does not say whose
    they were. A task that has ended by SIGKILL since the count was lower is taken for one of them.
    """

    def __init__(self) -> None:
        self._seen = _count()

    def named(self, code: int) -> int:
        """Returns the exit code of a process that has just ended, perhaps as `OutOfMemory`."""
        if code != -signal.SIGKILL or _count() <= self._seen:
            return code
        self._seen += 1
        return OutOfMemory(code)


def _count() -> int:
    try:
        lines = _STATISTICS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line[len(_FIELD) :]) for line in lines if line.startswith(_FIELD)), 0)
