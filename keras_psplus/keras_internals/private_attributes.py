"""Private attributes of other packages: whether they are there, found without making an object."""

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any


def check_attributes(package: str, owners: Iterable[tuple[Any, str]]) -> None:
    """Checks that private attributes are where they are relied on.

    Args:
        package: Name and version of the package, for the error.
        owners: List of pairs: a class or a module, and the names of attributes, with spaces.

    Raises:
        ImportError: If one is missing; it is named.
    """
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in owners
        for name in names.split()
        if not has(owner, name)
    ]
    if missing:
        raise ImportError(
            f"keras_psplus does not fit {package}: it relies on {', '.join(missing)}. Install a "
            f"supported version. Received: {package}"
        )


def has(owner: Any, name: str) -> bool:
    """Whether a module has a name, or a class or its methods mention an attribute.

    Args:
        owner: Class or module.
    """
    if hasattr(owner, name):
        return True
    return inspect.isclass(owner) and any(name in code.co_names for code in _codes(owner))


def _codes(cls: type) -> Iterator[types.CodeType]:
    for base in cls.__mro__:
        for member in vars(base).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, types.FunctionType):
                yield function.__code__
