"""State of the compressors of gradients between pipelines."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.state.waiting_values import WaitingValues
from keras_psplus.core.state.worker_state import WorkerState
from keras_psplus.pipeline.failure import OF_TASKS
from keras_psplus.pipeline.replicas.copies import Copied
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import nest


class _Residual(NamedTuple):
    """Variable on a device, with what makes its first value, and its weight."""

    variable: tf.Variable
    first: Callable[[], tf.Tensor]
    weight: Callable[[], Any]


class Residuals(WorkerState):
    """States of compressors: TensorFlow variables on the devices that send."""

    kind = "pipeline"
    lost_errors = OF_TASKS

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__()
        self._strategy: Callable[[], Any] = weakref.ref(strategy)
        # By pipeline and name.
        self._states: dict[tuple[int, str], _Residual] = {}
        # By path: the weights that have it, which may be of several models.
        self._paths: dict[str, list[Any]] = {}
        self._waiting = weakref.WeakKeyDictionary[Any, dict[int, WaitingValues]]()

    def of(self, copied: Copied, pipeline: int, device: str, first: Any) -> Any:
        """State for a pipeline's gradient of a weight, created if there is none.

        Args:
            device: Name of the device that sends.
            first: Function without arguments that makes the first state.

        Returns:
            Structure of TensorFlow variables.
        """
        with tf.Graph().as_default():
            structure = first()
        leaves = nest.flatten_with_joined_string_paths(structure)
        prefix = self._name(copied)
        forms = {f"{prefix}/{path}": (leaf.shape, leaf.dtype) for path, leaf in leaves}
        known = [self._states.get((pipeline, name)) for name in forms]
        if any(one is None or one.weight is not copied.variable for one in known):
            loaded = self._loaded(copied.variable(), pipeline, forms)
            with ops.init_scope(), self._strategy().extended.making_on(device), tf.device(device):
                for i, name in enumerate(forms):
                    begin = functools.partial(_leaf, first, i, device)
                    value = loaded.get(name, begin())
                    variable = tf.Variable(value, trainable=False, name="residual")
                    self._states[pipeline, name] = _Residual(variable, begin, copied.variable)
        variables = [self._states[pipeline, name].variable for name in forms]
        return tf.nest.pack_sequence_as(structure, variables)

    def _name(self, copied: Copied) -> str:
        path = copied.variable().path
        known = self._paths.setdefault(path, [])
        known[:] = [one for one in known if one() is not None]
        if all(one() is not copied.variable() for one in known):
            known.append(copied.variable)
        number = next(i for i, one in enumerate(known) if one() is copied.variable())
        return f"{path}#{number}" if number else path

    def _loaded(
        self, weight: keras.Variable, pipeline: int, forms: dict[str, Any]
    ) -> dict[str, Any]:
        """Values that were loaded for the optimizer of a weight."""
        for owner, waiting in self._waiting.items():
            if any(one is weight for one in owner._trainable_variables):
                return waiting[pipeline].take(forms)
        return {}

    @property
    def has_any(self) -> bool:
        return bool(self._alive())

    @property
    def may_keep(self) -> bool:
        return self._strategy().compression is not None

    @property
    def units(self) -> Sequence[int]:
        return range(self.total)

    @property
    def total(self) -> int:
        return self._strategy().pipelines

    @property
    def layout(self) -> str:
        return f"{self.total}-pipelines"

    def arrays(
        self, owner: keras.optimizers.Optimizer, unit: int
    ) -> Iterator[tuple[str, np.ndarray]]:
        for name, residual in self._of_owner(owner, unit).items():
            yield name, residual.variable.numpy()

    def assign(
        self, owner: Any, values: Mapping[int, Mapping[str, np.ndarray]], is_strict: bool
    ) -> None:
        waiting = self._waiting[owner] = {unit: WaitingValues() for unit in self.units}
        for unit, of_unit in values.items():
            known = self._of_owner(owner, unit)
            forms = {n: (one.variable.shape, one.variable.dtype) for n, one in known.items()}
            found = waiting[unit].put(of_unit, forms, is_strict)
            for name, residual in known.items():
                residual.variable.assign(found.get(name, residual.first()))

    def _alive(self) -> dict[tuple[int, str], _Residual]:
        self._states = {k: one for k, one in self._states.items() if one.weight() is not None}
        return self._states

    def _of_owner(self, owner: keras.optimizers.Optimizer, unit: int) -> dict[str, _Residual]:
        trained = {id(variable) for variable in owner._trainable_variables}
        return {
            name: residual
            for (pipeline, name), residual in self._alive().items()
            if pipeline == unit and id(residual.weight()) in trained
        }


def _leaf(first: Callable[[], Any], index: int, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.nest.flatten(first())[index]
