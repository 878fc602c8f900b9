"""Values and flags that one thread has for as long as a context lasts."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

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
    """False, except in threads that are in one of its contexts.

    Example:

    ```python
    saving = ThreadFlag()
    with saving.raised():
        assert saving
    ```
    """

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
