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
