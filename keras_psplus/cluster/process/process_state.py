"""Whether a process that was started some time ago still runs."""

import contextlib
import functools
import hashlib
import os
import pathlib
import socket

RUNNING, STOPPED, ENDED = "running", "stopped", "ended"


@functools.cache
def namespace() -> str:
    """Text that names what process ids are unique in: a container may have its own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def birth_of(pid: int) -> int | None:
    """Start time of a process, in ticks of the kernel's clock; None if unknown.

    Process ids are reused; together with the start time, they identify one process.
    """
    fields = _fields(pid)
    return None if fields is None else int(fields[19])


def state_of(pid: int, birth: int | None) -> str:
    """State of a process: `RUNNING`, `STOPPED` (by a signal) or `ENDED`.

    Args:
        birth: What `birth_of` has returned for it.
    """
    fields = _fields(pid)
    if fields is None:
        return RUNNING if birth is None and _answers(pid) else ENDED
    if fields[0] in "ZX" or birth is not None and int(fields[19]) != birth:
        return ENDED
    return STOPPED if fields[0] in "Tt" else RUNNING


def _fields(pid: int) -> list[str] | None:
    """Fields of `/proc/PID/stat` from the state on, after the process's name.

    The name may hold any characters.
    """
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()
    except OSError:
        return None


def _answers(pid: int) -> bool:
    """Whether there is such a process, where the system does not say more."""
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
