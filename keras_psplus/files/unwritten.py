"""File that could not be written, and that its library goes on writing to.

HDF5 keeps what it could not write, and tries again when Python ends. If that fails as well, as it
does on a full disk, the process ends by SIGSEGV.
"""

from __future__ import annotations

import contextlib
import os


def divert(path: str) -> None:
    """Has this process write to memory what it still means to write to a file.

    Args:
        path: The file, which is worth nothing any more. Nothing happens if it is not open, or
            where the system does not list the files that are.
    """
    with contextlib.suppress(OSError, AttributeError):
        target = os.stat(path)
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
        for descriptor in opened:
            # The list has had a descriptor of its own.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), target):
                    _replace(descriptor)


def _replace(descriptor: int) -> None:
    # Not the null device: HDF5 also changes the file's length.
    memory = os.memfd_create("unwritten")
    try:
        os.dup2(memory, descriptor, inheritable=False)
    finally:
        os.close(memory)
