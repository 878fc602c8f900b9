"""What the chief does for all workers, while these wait."""

import json
from concurrent import futures

from keras_psplus.all_reduce import failure
from keras_psplus.hybrid.calls import TableServerError, TableServerLostError

# After which the others hear that it goes on.
_TURN_SECONDS = 20.0
_ERRORS = {
    kind.__name__: kind
    for kind in (ValueError, OSError, TableServerError, TableServerLostError, failure.PeerLostError)
}


def on_chief(control, is_chief, what, work):
    """Has the chief do something; to be called on all workers.

    However long it takes, the others know that the chief is at it, and what fails there, fails
    everywhere.

    Args:
        control: `all_reduce.control.ControlPlane`, or None if there is one worker.
        is_chief: Whether this is the chief.
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
        said = {"goes_on": True}
        while said.get("goes_on"):
            said = json.loads(control.exchange(what, "")[0])
        if "error" in said:
            raise _ERRORS.get(said["kind"], RuntimeError)(said["error"])
        return said["result"]
    # Not in this thread, which talks to the others.
    pool = futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    while not futures.wait([future], _TURN_SECONDS).done:
        control.exchange(what, json.dumps({"goes_on": True}))
    error = future.exception()
    if error is not None:
        said = {"error": f"{error}", "kind": type(error).__name__}
        control.exchange(what, json.dumps(said))
        raise error
    control.exchange(what, json.dumps({"result": future.result()}))
    return json.loads(json.dumps(future.result()))
