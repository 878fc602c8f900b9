"""Variables of a snapshot beside the tables, and their comparison with a model's."""

from collections.abc import Iterable
from typing import Any

import keras

from keras_psplus.core.backup import training_state
from keras_psplus.core.base import optimizer_states, optimizers
from keras_psplus.hybrid.tables.variable import TableVariable
from keras_psplus.log import logger


def variables_of(model: keras.Model) -> dict[str, keras.Variable]:
    """All that a job keeps beside the tables, by names in files."""
    every: Any = [
        *model.variables,
        *model.metrics_variables,
        *optimizers.variables_of_optimizers(model),
    ]
    every = {id(v): v for v in every if not is_table(v)}
    return {f"{i}/{variable.path}": variable for i, variable in enumerate(every.values())}


def form(name: str, variable: keras.Variable) -> list[Any]:
    """Properties of a variable that must be equal in a snapshot and a model."""
    return [name, list(variable.shape), variable.dtype]


def forms(variables: dict[str, keras.Variable]) -> list[list[Any]]:
    """The forms of all variables of a dict, a list."""
    return [form(name, variable) for name, variable in variables.items()]


def log_passed_over(fits: int, model: keras.Model, step: int, values: Iterable[str]) -> None:
    """Says that a `fit` is passed over, and which weights are not in the snapshot."""
    logger.info(
        "call %d of `fit` is passed over: it had ended before the snapshot of step %d, whose "
        "weights the model has now",
        fits,
        step,
    )
    found = {name.partition("/")[2] for name in values}
    missing = [v.path for v in model.weights if v.path not in found and not is_table(v)]
    if missing:
        logger.warning(
            "weights of a model that was trained before the snapshot are not in it, and have their "
            "first values. Save them between calls of `fit`. Received: %s",
            ", ".join(missing),
        )


def is_table(variable: Any) -> bool:
    """Whether servers keep a variable, and write it to snapshots."""
    return isinstance(getattr(variable, "_value", None), TableVariable)


def check_same_model(
    folder: str, listed: dict[str, Any], model: keras.Model, variables: dict[str, keras.Variable]
) -> None:
    """Sees that a snapshot is one of this model, whose variables `variables_of` has found.

    Raises:
        ValueError: If it is not.
    """
    own, saved = forms(variables), listed["variables"]
    if own == saved:
        differing = training_state.difference_beside_weights(model, listed["training"])
    else:
        differing = optimizer_states.first_difference(own, saved)
    if differing is None:
        return
    raise ValueError(
        "The last snapshot is one of another model, or of one that was compiled otherwise. Give "
        "this job its own `snapshot_dir`, or delete what is in it. "
        f"Received: {differing[0]} for {differing[1]} in {folder}"
    )
