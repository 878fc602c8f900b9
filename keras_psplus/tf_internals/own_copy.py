"""A replica's own copy of a mirrored variable."""

from typing import Any


def own_copy(variable: Any) -> Any:
    """This replica's copy of a mirrored variable; another variable is returned as it is."""
    if hasattr(variable, "_get_on_device_or_primary"):
        return variable._get_on_device_or_primary()
    return variable
