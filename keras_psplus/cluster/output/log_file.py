"""A task's log file, also on a disk that is full."""

import collections
import contextlib
import os
from collections.abc import Callable

_KEPT_LINES, _KEPT_CHARACTERS = 200, 4000


class LogFile:
    """Writes text to a file; a file that cannot be written stops nobody.

    The last lines that the file did not take are kept in memory, so that the end of a task's output
    is known in any case.

    Args:
        append: Whether the file goes on with what it holds.
        warn: Function that is called with a line of text the first time that a write fails.
        heading: Text to begin with, which `size` counts.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        append: bool,
        warn: Callable[[str], None],
        heading: str = "",
    ) -> None:
        self._path, self._warn = path, warn
        # Without a buffer there is nothing left that closing it would have to write.
        self._file = open(path, "ab" if append else "wb", buffering=0)
        self._has_failed = False
        self._lost: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.write(heading)
        self.size = os.fstat(self._file.fileno()).st_size

    @property
    def lost(self) -> str:
        """The last lines that are not in the file, as one text."""
        return "".join(self._lost)

    def write(self, text: str) -> None:
        """Writes a line, or a part of one that is very long."""
        data = text.encode("utf-8", "replace")
        try:
            while data:
                data = data[self._file.write(data) :]
        except (OSError, ValueError) as error:
            self._lost.append(text[-_KEPT_CHARACTERS:])
            if not self._has_failed:
                self._has_failed = True
                self._warn(
                    f"cannot write {self._path} ({error}); the job goes on, and what the file "
                    "lacks is on the console only"
                )

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._file.close()
