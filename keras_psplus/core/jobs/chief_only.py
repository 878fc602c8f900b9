"""Functions that the chief runs for all workers while they wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any

from keras_psplus import errors

if TYPE_CHECKING:
    from keras_psplus.core.jobs.control import ControlPlane

# After which the others hear that it goes on.
_TURN_SECONDS = 20.0
# Kinds of errors of the chief that all workers raise.
_ERRORS: dict[str, type[Exception]] = {
    "OSError": OSError,
    "ValueError": ValueError,
    **{name: getattr(errors, name) for name in errors.__all__},
}


def run_on_chief(
    control: ControlPlane | None, is_chief: bool, what: str, work: Callable[[], Any]
) -> Any:
    """Has the chief do something; to be called on all workers.

    However long it takes, the others know that the chief is at it, and what fails there, fails
    everywhere.

    Args:
        control: `core.jobs.control.ControlPlane`, or None if there is one worker.
        what: What it is, for messages.
        work: Function without arguments that returns what can be turned into JSON.

    Returns:
        What `work` has returned on the chief.

    Raises:
        Exception: What it has raised there.
    """
    if control is None:
        return work()
    if not is_chief:
        message: dict[str, Any] = {"goes_on": True}
        while message.get("goes_on"):
            message = json.loads(control.exchange(what, "")[0])
        if "error" in message:
            raise _ERRORS.get(message["kind"], RuntimeError)(message["error"])
        return message["result"]
    # Not in this thread, which talks to the others.
    pool = futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    while not futures.wait([future], _TURN_SECONDS).done:
        control.exchange(what, json.dumps({"goes_on": True}))
    error = future.exception()
    if error is not None:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        message = {"error": f"{error}", "kind": next((k for k in kinds if k in _ERRORS), "")}
        control.exchange(what, json.dumps(message))
        raise error
    control.exchange(what, json.dumps({"result": future.result()}))
    return json.loads(json.dumps(future.result()))
