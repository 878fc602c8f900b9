"""Threads: values that one of them has, and work that nothing waits for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

# Values and flags that one thread has for as long as a context lasts.

T = TypeVar("T")


class ThreadValue(Generic[T]):
    """None, except in threads that are in one of its contexts: the innermost one's value."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __call__(self) -> T | None:
        return getattr(self._local, "value", None)

    @contextlib.contextmanager
    def being(self, value: T | None) -> Iterator[T]:
        """Context in which it is a value, which the context returns."""
        outer, self._local.value = self(), value
        try:
            yield value  # type: ignore[misc]
        finally:
            self._local.value = outer


class ThreadFlag:
    """False, except in threads that are in one of its contexts."""

    def __init__(self) -> None:
        self._value = ThreadValue[bool]()

    def __bool__(self) -> bool:
        return bool(self._value())

    def raised(self) -> contextlib.AbstractContextManager[bool]:
        """Context in which it is true for this thread."""
        return self._value.being(True)

    def lowered(self) -> contextlib.AbstractContextManager[bool]:
        """Context, inside of one of the others, in which it is false for this thread."""
        return self._value.being(False)


# Writes a backup while training goes on; one at a time.


class BackgroundWriter:
    """A thread for each thing that is written; a process that ends waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begins to write, once what was begun before is done.

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


# Work in threads that nothing waits for at the end of the process.


def start(function: Callable[[], Any], name: str) -> concurrent.futures.Future[Any]:
    """Calls a function in a thread.

    Unlike the threads of an executor, it does not keep the process from ending: what it waits for,
    data or a worker, may never come.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
