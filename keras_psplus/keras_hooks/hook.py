"""Replacement of one function of Keras, TensorFlow or Python: its contract, reason, and engine.

Each name is replaced once. The replacement finds the engine from one of its arguments, and gives it
a `Call`; without an engine it calls Keras's function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import tensorflow as tf

from keras_psplus.core import models
from keras_psplus.core.batch import replica_step
from keras_psplus.core.graph import compiled_calls
from keras_psplus.core.live import OutsideScope, in_step
from keras_psplus.engine import Call, engine_of
from keras_psplus.keras_internals.keras_parts import Variable
from keras_psplus.tables import local

if TYPE_CHECKING:
    from keras_psplus.engine import Engine


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function that is replaced.

    Attributes:
        owner: The class or module that has it.
        function: Its name, and those of its parameters that are relied on, in order.
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
    function: str
    find: Callable[..., Any] | None
    ask: str | Callable[[Call], Any]
    why: str
    call: str = ""
    by: int = 0
    is_added: bool = False

    @functools.cached_property
    def name(self) -> str:
        return self.function.partition("(")[0]

    @functools.cached_property
    def parameters(self) -> list[str]:
        return re.findall(r"\w+", self.function.partition("(")[2])

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
        """Replaces the function."""
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


# Finders of the engine that a hook calls.
#
# It is that of the strategy of a model, an optimizer, a scope, or a step. A finder is given one
# argument of the function that is called: `Hook.by` says which.

_outside = OutsideScope()


def of_model(model: keras.Model | None) -> Engine | None:
    """Engine of a model's strategy; `OutsideScope` for a model that has none."""
    if model is None:
        return None
    strategy = getattr(model, "_distribute_strategy", None)
    return _outside if strategy is None else engine_of(strategy)


def of_loading(_: Any) -> Engine:
    """`OutsideScope`, which has to know what is compiled because a file says so."""
    return _outside


def of_holder(holder: Any) -> Engine | None:
    """Engine of an object's strategy, as Keras has stored it."""
    return engine_of(getattr(holder, "_distribute_strategy", None))


def of_exported(model: keras.Model) -> Engine | None:
    """Engine of a model's strategy, or of tables in memory."""
    return of_holder(model) or local.engine_in_use()


def of_archive(archive: Any) -> Engine | None:
    """Engine of the variables that an `ExportArchive` tracks, or of the scope.

    None while a model is exported, which has an archive of its own.
    """
    if models.exporting_flag:
        return None
    return next(filter(None, map(of_variable, archive.variables)), None) or of_scope()


def of_callback(callback: Any) -> Engine | None:
    """Engine of a callback's model, or of a list of callbacks."""
    return of_holder(getattr(callback, "_model", None))


def of_optimizer(optimizer: Any) -> Engine | None:
    """Engine of an optimizer's strategy, or of tables in memory."""
    return _of_strategy(optimizer) or local.engine_in_use()


def _of_strategy(optimizer: Any) -> Engine | None:
    return engine_of(getattr(optimizer, "_distribution_strategy", None))


def of_applied(optimizer: Any) -> Engine | None:
    """As `of_optimizer`; `OutsideScope` for one of no strategy, and in a strategy's scope."""
    if in_step():
        return _of_strategy(optimizer) or _outside
    in_scope = tf.distribute.in_cross_replica_context()
    return (None if in_scope else of_optimizer(optimizer)) or _outside


def of_scope(_: Any = None) -> Engine | None:
    """Engine of the current strategy, in a scope or in replica context."""
    return engine_of(tf.distribute.get_strategy())


def of_step(_: Any = None) -> Engine | None:
    """Engine of the replica's step that this thread is tracing or running."""
    step = replica_step.current_step()
    return None if step is None else step.engine


def of_tape(_: Any = None) -> Engine | None:
    """As `of_step`; `OutsideScope` in a strategy's scope, outside of its replicas."""
    return of_step() or (_outside if tf.distribute.in_cross_replica_context() else None)


def of_handed_over(_: Any = None) -> Engine | None:
    """As `of_step`, of an engine whose steps hand gradients over, and apply them later."""
    engine = of_step()
    return engine if engine is not None and engine.hands_over else None


def of_layer_call(_: Any = None) -> Engine | None:
    """As `of_step`; or the engine of a worker's step that XLA compiles parts of."""
    engine, current = of_step(), compiled_calls.current()
    return current[0] if engine is None and current is not None else engine


def of_variables(variables: Sequence[Any] | None) -> Engine | None:
    """Engine of the strategy of the first Keras variable in a list."""
    return of_variable(variables[0]) if isinstance(variables, (list, tuple)) and variables else None


def of_variable(variable: Any) -> Engine | None:
    """Engine of the present step, or of a Keras variable's strategy."""
    engine = of_step()
    if engine is not None or not isinstance(variable, Variable):
        return engine
    made_by = getattr(variable, "_made_by", None)
    return None if made_by is None else made_by()
