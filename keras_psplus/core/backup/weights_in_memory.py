"""Copies of weights in memory, which a thread writes to a file later."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_psplus.keras_internals.keras_parts import saving_lib


class WeightsInMemory(saving_lib.H5IOStore):
    """A copy of a model's and its optimizers' variables, as they are now."""

    def __init__(self, model: keras.Model) -> None:
        # Not the file's constructor: there is none.
        self._entries: list[tuple[str, Any, dict[str, np.ndarray]]] = []
        self._values: dict[str, np.ndarray] = {}
        saving_lib._save_state(model, self, None, "", set())

    def write(self, path: str) -> None:
        """Writes the file that `model.save_weights` would have written."""
        store = saving_lib.H5IOStore(path, mode="w")
        try:
            for inner_path, metadata, values in self._entries:
                entry = store.make(inner_path, metadata=metadata)
                for key, value in values.items():
                    entry[key] = value
        finally:
            store.close()

    # What Keras and layers call.

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> WeightsInMemory:
        self._values = {}
        self._entries.append((path, metadata, self._values))
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        # Copies: the next step may write to the variable's memory.
        is_variable = isinstance(value, keras.Variable)
        self._values[key] = value.numpy() if is_variable else np.array(value)

    def __getitem__(self, key: str) -> np.ndarray:
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> Any:
        return self._values.keys()
