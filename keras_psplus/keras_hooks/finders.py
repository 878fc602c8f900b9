"""Finders of the engine that a hook calls.

It is that of the strategy of a model, an optimizer, a scope, or a step. A finder is given one
argument of the function that is called: `Hook.by` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.batch import replica_step
from keras_psplus.core.graph import compiled_calls
from keras_psplus.core.models import model_saving
from keras_psplus.core.models.outside_models import OutsideScope
from keras_psplus.keras_internals.keras_parts import Variable
from keras_psplus.tables import local

if TYPE_CHECKING:
    import keras

    from keras_psplus.engine import Engine

_outside = OutsideScope()


def engine_of(strategy: object) -> Engine | None:
    """Engine of a strategy, or None if the strategy is not this library's."""
    return getattr(strategy, "engine", None)


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
    if model_saving.exporting_flag:
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
    """As `of_optimizer`; `OutsideScope` for one of no strategy that a step applies."""
    if _of_strategy(optimizer) is None and (of_step() is not None or _in_replica()):
        return _outside
    return of_optimizer(optimizer)


def of_scope(_: Any = None) -> Engine | None:
    """Engine of the current strategy, in a scope or in replica context."""
    return engine_of(tf.distribute.get_strategy())


def of_step(_: Any = None) -> Engine | None:
    """Engine of the replica's step that this thread is tracing or running."""
    step = replica_step.current_step()
    return None if step is None else step.engine


def of_handed_over(_: Any = None) -> Engine | None:
    """As `of_step`, of an engine whose steps hand gradients over, and apply them later."""
    engine = of_step()
    return engine if engine is not None and engine.hands_over else None


def of_layer_call(_: Any = None) -> Engine | None:
    """As `of_step`; or the engine of a worker's step that XLA compiles parts of."""
    engine, current = of_step(), compiled_calls.current()
    return current[0] if engine is None and current is not None else engine


def _in_replica() -> bool:
    return of_scope() is not None and not tf.distribute.in_cross_replica_context()


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
