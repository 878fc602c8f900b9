"""Work in threads that nothing waits for at the end of the process."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


def start(function: Callable[[], Any], name: str) -> concurrent.futures.Future[Any]:
    """Calls a function in a thread.

    Unlike the threads of an executor, it does not keep the process from ending: what it waits for,
    data or a worker, may never come.

    Args:
        function: Function without arguments.

    Returns:
        Future of what the function returns or raises.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
