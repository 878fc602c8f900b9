"""A flag that one thread raises for as long as a context lasts."""

import contextlib
import threading
from collections.abc import Iterator


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
        self._local = threading.local()

    def __bool__(self) -> bool:
        return getattr(self._local, "is_raised", False)

    def raised(self) -> contextlib.AbstractContextManager[None]:
        """Context in which it is true for this thread."""
        return self._set(True)

    def lowered(self) -> contextlib.AbstractContextManager[None]:
        """Context, inside of one of the others, in which it is false for this thread."""
        return self._set(False)

    @contextlib.contextmanager
    def _set(self, is_raised: bool) -> Iterator[None]:
        outer, self._local.is_raised = bool(self), is_raised
        try:
            yield
        finally:
            self._local.is_raised = outer
