"""Identity of a process: its machine, id and birth there, and an id for peers."""

import contextlib
import functools
import hashlib
import os
import pathlib
import socket
import uuid

RUNNING, STOPPED, ENDED = "running", "stopped", "ended"


@functools.cache
def machine() -> str:
    """Id of the scope in which process ids are unique, such as a container."""
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
    """State of a process: `RUNNING`, `STOPPED` (by a signal) or `ENDED`."""
    fields = _fields(pid)
    if fields is None:
        # Where the system does not say more.
        answers = birth is None and not os.path.isdir("/proc/self") and runs(pid)
        return RUNNING if answers else ENDED
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


def runs(pid: int) -> bool:
    """Whether there is a process of this id on this machine, perhaps another user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def own_id() -> str:
    """Id by which peers tell this process from all others; a fork has another one."""
    return _id_of(os.getpid())


@functools.cache
def _id_of(pid: int) -> str:
    return f"{pid}-{uuid.uuid4().hex}"
