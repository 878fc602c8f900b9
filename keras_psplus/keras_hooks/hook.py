"""Replacement of one function of Keras, TensorFlow or Python: its contract, reason, and engine.

Each name is replaced once. The replacement finds the engine from one of its arguments, and gives it
a `Call`; without an engine it calls Keras's function.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_psplus.engine import Call


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function that is replaced.

    Attributes:
        owner: The class or module that has it.
        parameters: Names of its parameters that are relied on, in order.
        find: Function of one of its arguments that returns the engine to ask, or None. None for
            what a module changes on objects of its own.
        ask: Name of the engine's method; a function of the `Call`, where all engines answer alike;
            or the name of that module.
        why: Why it is replaced, for people.
        call: Name of the call for the engine; if empty, the function's own.
        by: Number of the argument that `find` is given.
        is_added: Whether Keras has no such function: where there is no engine, it is as if there
            were none.
    """

    owner: Any
    name: str
    parameters: list[str]
    find: Callable[..., Any] | None
    ask: str | Callable[[Call], Any]
    why: str
    call: str = ""
    by: int = 0
    is_added: bool = False

    @property
    def where(self) -> str:
        """The function's full name."""
        if inspect.ismodule(self.owner):
            return f"{self.owner.__name__}.{self.name}"
        return f"{self.owner.__module__}.{self.owner.__name__}.{self.name}"

    @property
    def answered_by(self) -> str:
        """The method or function that is asked, and by which name of the call."""
        if isinstance(self.ask, str):
            return self.ask if self.find is None else f'{self.ask}("{self.call or self.name}")'
        return f"{self.ask.__module__}.{self.ask.__name__}"

    @property
    def is_installed(self) -> bool:
        """Whether the function is replaced in this process."""
        return getattr(self._current(), "replaced_by", None) is self

    def found(self) -> list[str] | None:
        """Names of the parameters of Keras's own function; None if it has none."""
        function = self._current()
        if self.is_installed:
            function = function.__wrapped__
        if function is None or self.is_added and self.is_installed:
            return None
        # Anything may be in the place of what nothing is relied on of.
        return list(inspect.signature(function).parameters) if self.parameters else []

    def check_signature(self) -> None:
        """Raises ImportError if this Keras has no such function, or it takes other parameters."""
        found = self.found()
        fits = found is None if self.is_added else found is not None
        if not fits or found is not None and found[: len(self.parameters)] != self.parameters:
            relied = f"{self.where} with the parameters {self.parameters}"
            if self.is_added:
                relied = f"the absence of {self.where}"
            package, version = "Keras", keras.__version__
            if self.where.startswith("tensorflow."):
                package, version = "TensorFlow", tf.__version__
            raise ImportError(
                f"keras_psplus does not fit {package} {version}: it relies on {relied}. "
                f"Install a supported version of {package}. Received: {found}"
            )

    def engine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The engine that a call with these arguments asks, or None."""
        assert self.find is not None
        return self.find(args[self.by] if len(args) > self.by else kwargs.get(self._by_name))

    @property
    def _by_name(self) -> str:
        return self.parameters[self.by] if self.parameters else ""

    def install(self) -> None:
        """Replaces the function.

        Raises:
            ImportError: If it does not fit.
        """
        self.check_signature()
        find, ask, by, name = self.find, self.ask, self.by, self._by_name
        if find is None:
            return
        original = self._missing() if self.is_added else self._current()
        first, *others = self._positional(original) or [""]
        called = self.call or self.name

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            # As `engine`, without a call more: this is asked for each attribute of a metric.
            engine = find(args[by] if len(args) > by else kwargs.get(name))
            if engine is None:
                return original(*args, **kwargs)
            owner, args = (args[0], args[1:]) if args else (kwargs.pop(first, None), ())
            call = Call(original, owner, args, kwargs, called, engine, others)
            return ask(call) if callable(ask) else getattr(engine, ask)(call)

        if self.parameters:
            # Keras looks at the arguments of constructors, and does not follow wrappers there.
            replaced.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        replaced.replaced_by = self  # type: ignore[attr-defined]
        setattr(self.owner, self.name, replaced)

    def _positional(self, original: Callable[..., Any]) -> list[str]:
        """Names of the parameters that may be given without their names."""
        if self.is_added or not self.parameters:
            return self.parameters
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(original).parameters.items()
        return [name for name, one in parameters if one.kind in kinds]

    def _current(self) -> Any:
        return getattr(self.owner, self.name, None)

    def _missing(self) -> Callable[..., Any]:
        name = self.name

        def missing(*args: Any, **kwargs: Any) -> NoReturn:
            raise AttributeError(name)

        return missing
