"""Keeps freed memory in the process, all of it or a little.

The C library's `malloc` requests large blocks from the kernel and returns them as soon as they are
freed; the kernel clears the pages of a new block one by one, at their first use. A step of training
frees and allocates the same large blocks again: gradients, residuals, messages. In a perceptron of
29 million weights under `compression="int8"`, that was half of a step's time.
"""

import ctypes
import os

# Parameters as <malloc.h> has them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_ARENA_MAX",
)


def keep_freed_memory() -> bool:
    """Tells glibc's `malloc` to keep what is freed, unless the user has chosen its settings.

    The process then holds what each of its heaps ever needed at once, so it is given no more heaps
    than it has processors. A user chooses by the environment variables that glibc reads,
    `MALLOC_TRIM_THRESHOLD_`, `MALLOC_TOP_PAD_`, `MALLOC_MMAP_THRESHOLD_`, `MALLOC_ARENA_MAX` and
    `GLIBC_TUNABLES`. With another C library, or another `malloc`, this does nothing.
    """
    return _tell(
        {
            _MMAP_THRESHOLD: 1 << 30,
            _TRIM_THRESHOLD: (1 << 31) - 1,  # the most that it can be told
            # Without this, whole heaps of threads, of 64 MiB each, would still be returned.
            _TOP_PAD: 64 << 20,
            _ARENA_MAX: max(2, len(os.sched_getaffinity(0))),
        }
    )


def keep_little_freed_memory() -> bool:
    """Tells glibc's `malloc` to keep no more than a few buckets of what is freed.

    For processes that have to be small. Messages of a step still find pages that the kernel has
    cleared: with everything returned at once, they took half of a step's time. The user's settings
    are kept, as by `keep_freed_memory`, which this takes back.
    """
    return _tell({_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 16 << 20})


def _tell(settings: dict[int, int]) -> bool:
    """Sets parameters of `malloc`, unless the user has chosen some or it is not glibc's."""
    chosen = any(name in os.environ for name in _VARIABLES)
    if chosen or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*setting) for setting in settings.items()])
