"""Optimizers of a model in a backup: their kinds, and their trained variables.

Keras reads an optimizer's variables from a file if the optimizer has them, and only the one that
`compile()` was given is built before the first step. Those of a train_step's own are built here, by
what the backup says of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base import optimizers

_KIND, _TRAINS, _VARIABLES = "class", "trains", "variables"


def describe(model: keras.Model) -> dict[str, Any]:
    """Describes all optimizers that a model reaches, as a dict for JSON."""
    places = _places(model)
    found: dict[str, Any] = {}
    for name, one in optimizers.reached_optimizers(model).items():
        inner = optimizers.unwrapped(one)
        found[name] = {_KIND: type(inner).__name__, _TRAINS: None, _VARIABLES: None}
        if one.built:
            trained = [places.get(id(v)) for v in inner._trainable_variables]
            found[name].update({_TRAINS: trained, _VARIABLES: forms(one.variables)})
    return found


def build(strategy: tf.distribute.Strategy, model: keras.Model, described: dict[str, Any]) -> None:
    """Builds optimizers that were built when the backup was made; in each process alike.

    Args:
        described: What `describe` has returned then.
    """
    own = optimizers.reached_optimizers(model)
    places = None
    for name, of_backup in described.items():
        one = own.get(name)
        if one is None or one.built or of_backup[_TRAINS] is None:
            continue
        if places is None:
            places = by_place(model)
        trained = [places.get(place) for place in of_backup[_TRAINS]]
        if all(variable is not None for variable in trained):
            with strategy.scope():
                one.build(trained)


def difference(model: keras.Model, described: dict[str, Any]) -> tuple[str, str] | None:
    """Finds what differs between a model's optimizers and those of a backup.

    Args:
        model: The model, when `build` has built its optimizers.
        described: What `describe` has returned for the backup's.

    Returns:
        Two texts, of the model and of the backup, or None if they are the same.
    """
    own = describe(model)
    for name in sorted({*own, *described}):
        ours, theirs = own.get(name), described.get(name)
        if ours is None or theirs is None or ours[_KIND] != theirs[_KIND]:
            return _named(name, ours), _named(name, theirs)
        if theirs[_VARIABLES] is not None and ours[_VARIABLES] != theirs[_VARIABLES]:
            first, second = first_difference(ours[_VARIABLES] or (), theirs[_VARIABLES])
            return f"{first} in {_named(name, ours)}", f"{second} in {_named(name, theirs)}"
    return None


def check_reached(model: keras.Model, used: Iterable[keras.optimizers.Optimizer]) -> None:
    """Sees that all optimizers of a step can be restored in another process.

    Args:
        used: The optimizers that steps have built.

    Raises:
        ValueError: If one of them, or a variable that it trains, is not reached from the model.
    """
    reached = {id(optimizers.unwrapped(one)) for one in optimizers.optimizers_of(model).values()}
    places, lost = _places(model), []
    for one in map(optimizers.unwrapped, used):
        if id(one) not in reached:
            lost.append(f"optimizer '{one.name}' ({type(one).__name__})")
        lost += [v.path for v in one._trainable_variables if id(v) not in places]
    if lost:
        raise ValueError(
            "A backup would lack what a step of this model changes, and a job that resumes from it "
            "would go on with other numbers. Make it an attribute of the model: "
            f"`model.optimizer_2 = ...`. Received: {', '.join(dict.fromkeys(lost))}"
        )


def first_difference(own: Sequence[Any], saved: Sequence[Any]) -> tuple[Any, Any]:
    """The first pair of elements that differ, or else the lengths."""
    differing = ((a, b) for a, b in zip(own, saved) if a != b)
    return next(differing, (len(own), len(saved)))


def forms(variables: Iterable[Any]) -> list[list[Any]]:
    """The shapes and types of variables."""
    return [[list(variable.shape), tf.as_dtype(variable.dtype).name] for variable in variables]


def by_place(model: keras.Model) -> dict[Any, Any]:
    """Variables by their number in the model, or by their name within it."""
    return dict([*optimizers.other_variables(model).items(), *enumerate(model.variables)])


def _places(model: keras.Model) -> dict[int, int | str]:
    return {id(variable): place for place, variable in by_place(model).items()}


def _named(name: str, of_one: Mapping[str, Any] | None) -> str:
    return "no" if of_one is None else f"{of_one[_KIND]} '{name}'"
