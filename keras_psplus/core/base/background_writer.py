"""Writes a backup while training goes on; one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """A thread for each thing that is written; a process that ends waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begins to write, once what was begun before is done.

        Args:
            write: Function without arguments.

        Raises:
            Exception: What the one before has raised.
        """
        self.finish()

        def run() -> None:
            try:
                write()
            except BaseException as error:  # Raised by the next call.
                self._error = error

        # No daemon: a script that ends in an error has its last backup written to the end.
        self._thread = threading.Thread(target=run, name="backup")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether something is written now."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until all is written; `finish` says later whether it could be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Waits until all is written.

        Raises:
            Exception: What writing has raised.
        """
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
