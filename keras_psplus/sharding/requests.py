"""Requests of workers for variables in shares.

A request is a dict: `by` is the rank of the worker that asks, `variable` the number of what it
reads, or gives a value if it `gives` one; `steps` and `writes` are how many steps and changes of
the variable the answer must not be older than.
"""

from __future__ import annotations

from typing import Any


def is_answered(own: dict[str, Any], rank: int, request: dict[str, Any]) -> bool:
    """Whether an answer to any worker's request is the one that a worker waits for.

    Args:
        own: Its own request, without `by`.
    """
    if "steps" not in own or "gives" in own or "gives" in request:
        return own | {"by": rank} == request
    # Another worker's answer is no older than what this one has to read.
    return own["variable"] == request.get("variable") and all(
        own[count] <= request[count] for count in ("steps", "writes")
    )


def error_of(request: dict[str, Any], name: str) -> RuntimeError:
    """The error of a request that a worker waits for in vain.

    Args:
        name: The worker's.
    """
    return RuntimeError(
        "A worker reads a variable in shares that another has not made or used, or is steps "
        "ahead. Every worker must run the same script. Received: variable "
        f"{request.get('variable')} after {request.get('steps')} steps, on {name}"
    )
