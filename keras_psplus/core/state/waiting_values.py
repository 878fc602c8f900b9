"""Loaded values of states that a step has yet to make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.log import logger

Forms = Mapping[str, tuple[tf.TensorShape, tf.DType]]
_MOST_NAMES = 3


class WaitingValues:
    """Values by the names of states, which are made when a step is traced.

    Values of a backup that do not fit are left out; those of `load_state_dict` raise: the next step
    has to make all states that have values, and no others.
    """

    def __init__(self) -> None:
        self._values: dict[str, np.ndarray] = {}
        self._is_strict = False
        # Training steps of this process when values were put.
        self._steps = 0

    def put(
        self, values: Mapping[str, np.ndarray], forms: Forms, is_strict: bool
    ) -> dict[str, np.ndarray]:
        """Replaces what waits.

        Args:
            values: Arrays by names.
            forms: Dict from the names of states that exist to their shapes and dtypes.
            is_strict: Whether to raise for what does not fit.

        Returns:
            Those of states that exist, in their dtypes.

        Raises:
            ValueError: If one of these has no value, or one of another shape.
        """
        missing = [name for name in forms if name not in values]
        if is_strict and missing:
            raise _misfit(f"it has nothing for {_listed(missing)}", values)
        fitting = self._fitting({n: values[n] for n in forms if n in values}, forms, is_strict)
        self._values = {name: value for name, value in values.items() if name not in forms}
        self._is_strict, self._steps = is_strict and bool(values), Progress.total
        return fitting

    def take(self, forms: Forms, is_partial: bool = False) -> dict[str, np.ndarray]:
        """Takes the values of states that are made together.

        Args:
            forms: Dict from their names to shapes and dtypes.
            is_partial: Whether some of them may have their values already.

        Raises:
            ValueError: If values of `load_state_dict` are for other states.
        """
        found = {name: self._values.pop(name) for name in forms if name in self._values}
        if self._is_strict and not is_partial and len(found) < len(forms):
            others = {**found, **self._values}
            if others or Progress.total == self._steps:
                raise _misfit(
                    f"it has nothing for {_listed(n for n in forms if n not in found)}", others
                )
        return self._fitting(found, forms, self._is_strict)

    def _fitting(
        self, values: Mapping[str, np.ndarray], forms: Forms, is_strict: bool
    ) -> dict[str, np.ndarray]:
        fitting = {}
        for name, value in values.items():
            shape, dtype = forms[name]
            value = typed(np.asarray(value), dtype)
            if shape.is_compatible_with(value.shape) and value.dtype == dtype.as_numpy_dtype:
                fitting[name] = value
                continue
            problem = (
                f"{name} has the shape {value.shape} and dtype {value.dtype.name}, not {shape} "
                f"and {dtype.name}"
            )
            if is_strict:
                raise _misfit(problem, values)
            logger.warning("what a worker had kept is not restored: %s", problem)
        return fitting


def _misfit(problem: str, values: Iterable[str]) -> ValueError:
    return ValueError(
        "The state is not one of this optimizer's: it comes from another model, compressor or "
        f"`updates`. Load what `state_dict` has returned under the same ones: {problem}. "
        f"Received: a state with {_listed(values) or 'nothing'}"
    )


def _listed(names: Iterable[str]) -> str:
    return text_table.listed(sorted(names), _MOST_NAMES)


def typed(array: np.ndarray, dtype: tf.DType) -> np.ndarray:
    """Array of a file in its dtype; NumPy's files do not support bfloat16."""
    is_unknown = array.dtype.kind == "V" and array.dtype.itemsize == dtype.size
    return array.view(dtype.as_numpy_dtype) if is_unknown else array
