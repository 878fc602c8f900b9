"""Training state in a backup, beside weights and seeds.

The position in the data, metrics, and callbacks' states.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus.core import callback_states
from keras_psplus.core.backup_states import TRAINING
from keras_psplus.files.reading import open_file
from keras_psplus.keras_parts import file_utils

if TYPE_CHECKING:
    import keras

_FACTS = "facts"


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
    ) -> TrainingState:
        """The present one.

        Args:
            model: The model.
            callbacks: The callbacks of its `fit`.
            position: Dict that says where in the data it is.
        """
        states, arrays = callback_states.states_of(callbacks)
        for i, variable in enumerate(model.metrics_variables):
            arrays[f"metrics/{i}"] = variable.numpy()
        facts = {**position, "callbacks": states, "variables": forms(model)}
        return cls(facts, arrays)

    @classmethod
    def read(cls, folder: str) -> TrainingState:
        """The one in a folder."""
        with open_file(file_utils.join(folder, TRAINING)) as file:
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

    def check_model(self, model: keras.Model, folder: str) -> None:
        """Sees that it is one of this model.

        Raises:
            ValueError: If it is not.
        """
        saved, own = self.facts["variables"], forms(model)
        if saved == own:
            return
        other = next(((a, b) for a, b in zip(saved, own) if a != b), (len(saved), len(own)))
        raise ValueError(
            "The backup is one of another model, or of one that was compiled otherwise. Give this "
            f"job its own `backup_dir`, or delete {folder}. "
            f"Received: {other[1]} in the model, {other[0]} in the backup"
        )

    def assign_metrics(self, model: keras.Model) -> None:
        """Gives a model's metrics what they had."""
        for i, variable in enumerate(model.metrics_variables):
            value = self.arrays.get(f"metrics/{i}")
            if value is not None and value.shape == tuple(variable.shape):
                variable.assign(value)

    def weights_of_callback(self, name: str, count: int, model: keras.Model) -> list[np.ndarray]:
        """The arrays that a callback has kept of a model's weights."""
        arrays = [self.arrays[f"{name}/{i}"] for i in range(count)]
        # NumPy's files do not know types such as bfloat16.
        return [
            array.view(tf.as_dtype(variable.dtype).as_numpy_dtype)
            if array.dtype.kind == "V"
            else array
            for array, variable in zip(arrays, model.weights)
        ]


def forms(model: keras.Model) -> list[list[Any]]:
    """The shapes and types of a model's variables."""
    return [[list(variable.shape), variable.dtype] for variable in model.variables]
