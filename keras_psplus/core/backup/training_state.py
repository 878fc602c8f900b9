"""Training state in a backup, beside weights and seeds.

The position in the data, metrics, and callbacks' states.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus.core.backup import callback_states
from keras_psplus.core.backup.backup_states import TRAINING, previous_path
from keras_psplus.core.base import optimizer_states
from keras_psplus.core.base.optimizers import other_variables, steps_of
from keras_psplus.core.state.waiting_values import typed
from keras_psplus.files.reading import open_file
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.tables.row_variable import rows_with_keys

if TYPE_CHECKING:
    import keras

_FACTS, _OTHERS = "facts", "others"


class TrainingState:
    """The state of a `fit`, as arrays and as what can be turned into JSON.

    Args:
        facts: Dict of what can be turned into JSON.
        arrays: Dict from names to arrays.
    """

    def __init__(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.facts, self.arrays = facts, arrays

    @classmethod
    def of(
        cls,
        model: keras.Model,
        callbacks: Sequence[keras.callbacks.Callback],
        position: dict[str, Any],
        has_value: Callable[[Any], bool] = lambda variable: True,
    ) -> TrainingState:
        """The present one.

        Args:
            callbacks: The callbacks of its `fit`.
            position: Dict that says where in the data it is.
            has_value: Function of a variable that tells whether its value belongs to the state.
        """
        states, arrays = callback_states.states_of(callbacks)
        for i, variable in enumerate(model.metrics_variables):
            arrays[f"metrics/{i}"] = variable.numpy()
        others = other_variables(model)
        for name, variable in others.items():
            if has_value(variable):
                arrays[f"{_OTHERS}/{name}"] = variable.numpy()
        facts = {
            **position,
            "callbacks": states,
            "variables": optimizer_states.forms(model.variables),
            "optimizers": optimizer_states.describe(model),
            "steps": steps_of(model),
            _OTHERS: dict(zip(others, optimizer_states.forms(others.values()))),
        }
        return cls(facts, arrays)

    @classmethod
    def read(cls, folder: str, is_previous: bool = False) -> TrainingState:
        """The state in a folder, or the one before."""
        path = file_utils.join(folder, TRAINING)
        with open_file(previous_path(path) if is_previous else path) as file:
            content = io.BytesIO(file.read())
        with np.load(content) as found:
            arrays = {name: found[name] for name in found.files}
        return cls(json.loads(arrays.pop(_FACTS).tobytes()), arrays)

    def write(self, folder: str) -> None:
        """Writes it to a folder."""
        facts = np.frombuffer(json.dumps(self.facts).encode(), np.uint8)
        content = io.BytesIO()
        np.savez(content, **{_FACTS: facts}, **self.arrays)  # type: ignore[arg-type]
        with tf.io.gfile.GFile(file_utils.join(folder, TRAINING), "wb") as file:
            file.write(content.getvalue())

    def assign_metrics(self, model: keras.Model) -> None:
        """Gives a model's metrics what they had."""
        for i, variable in enumerate(model.metrics_variables):
            value = self.arrays.get(f"metrics/{i}")
            if value is not None and value.shape == tuple(variable.shape):
                variable.assign(value)

    def assign_others(self, model: keras.Model) -> None:
        """Gives the variables that Keras does not save with a model what they had."""
        for name, variable in other_variables(model).items():
            value = self.arrays.get(f"{_OTHERS}/{name}")
            if value is not None and value.shape == tuple(variable.shape):
                variable.assign(typed(value, tf.as_dtype(variable.dtype)))

    def weights_of_callback(self, name: str, count: int, model: keras.Model) -> list[np.ndarray]:
        """The arrays that a callback has kept of a model's weights."""
        found = []
        for i, variable in zip(range(count), model.weights):
            array = typed(self.arrays[f"{name}/{i}"], tf.as_dtype(variable.dtype))
            found.append(rows_with_keys(array, self.arrays, f"{name}/{i}"))
        return found


def build_optimizers(
    strategy: tf.distribute.Strategy, model: keras.Model, facts: dict[str, Any]
) -> None:
    """Builds those optimizers of a model that were built when a state was saved."""
    optimizer_states.build(strategy, model, facts["optimizers"])


def check_model(
    model: keras.Model, facts: dict[str, Any], folder: str, with_optimizers: bool = True
) -> None:
    """Sees that a state is one of a model, whose optimizers have been built.

    Args:
        folder: Where it lies.
        with_optimizers: Whether optimizers have to be the same.

    Raises:
        ValueError: If it is not.
    """
    saved, own = facts["variables"], optimizer_states.forms(model.variables)
    differing: Any = None
    if saved != own:
        differing = optimizer_states.first_difference(own, saved)
    elif with_optimizers:
        differing = difference_beside_weights(model, facts)
    if differing is not None:
        raise ValueError(
            "The backup is one of another model, or of one that was compiled otherwise. Give this "
            f"job its own `backup_dir`, or delete {folder}. "
            f"Received: {differing[0]} in the model, {differing[1]} in the backup"
        )


def difference_beside_weights(model: keras.Model, facts: dict[str, Any]) -> Any:
    """Finds what differs between a model's optimizers and other variables and those of a state.

    Args:
        model: The model, whose optimizers have been built.

    Returns:
        Pair of what the model and the state have, or None if they are the same.
    """
    differing = optimizer_states.difference(model, facts["optimizers"])
    return differing or _different_others(model, facts[_OTHERS])


def _different_others(model: keras.Model, saved: dict[str, Any]) -> tuple[str, Any] | None:
    others = other_variables(model)
    own = dict(zip(others, optimizer_states.forms(others.values())))
    for name in sorted({*own, *saved}):
        if own.get(name) != saved.get(name):
            return f"{own.get(name)} for {name}", saved.get(name)
    return None
