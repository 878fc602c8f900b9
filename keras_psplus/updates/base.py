"""What all ways of updating have in common."""

import inspect


class Updates:
    """Base class of what strategies take as `updates=`: options, and nothing that changes.

    Attributes:
        local: Whether workers step alone, so that their weights differ until they are averaged.
    """

    local = False

    def __repr__(self):
        parameters = inspect.signature(type(self)).parameters
        options = [f"{name}={getattr(self, name)!r}" for name in parameters]
        return f"{type(self).__name__}({', '.join(options)})"


def get(updates):
    """Checks what a user gives as `updates=`.

    Args:
        updates: `Accumulate`, `LocalSGD`, `DiLoCo`, or None to communicate at every step.

    Returns:
        `updates`.

    Raises:
        ValueError: If it is something else.

    Example:

    >>> keras_psplus.updates.get(keras_psplus.updates.Accumulate(4))
    Accumulate(steps=4, flush=False)
    """
    if updates is None or isinstance(updates, Updates):
        return updates
    raise ValueError(
        "`updates` must be `keras_psplus.updates.Accumulate(steps)`, `LocalSGD(every)`, "
        f"`DiLoCo(every)`, or None. Received: updates={updates!r}"
    )
