"""State that lasts from step to step, as variables of one replica."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus.core.worker_state import WaitingValues, WorkerState
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import nest, resource_variable_ops

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.batch.batches import World
    from keras_psplus.core.jobs.control import ControlPlane


class ReplicaStates:
    """Variables of one replica that no other replica shares, found by name.

    They are made when they are first asked for, which may be inside a `tf.function` or a branch.
    Values that were loaded before are given to them then.

    Attributes:
        variables: Dict from names to variables, also those of `within`.
        waiting: Values of variables that are not made yet.
    """

    def __init__(self, device: str) -> None:
        self._device, self._prefix = device, ""
        self.variables: dict[str, tf.Variable] = {}
        self.waiting = WaitingValues()
        self._states: dict[str, tuple[Any, list[tf.Variable]]] = {}
        self._numbers: dict[int, tuple[int, Any]] = {}

    def within(self, name: str) -> ReplicaStates:
        """The same variables, by names that begin with another one."""
        part = ReplicaStates(self._device)
        part._prefix, part.variables, part.waiting = (
            f"{self._prefix}{name}/",
            self.variables,
            self.waiting,
        )
        return part

    def number(self, variable: Any) -> int:
        """A variable's number in names: paths differ from model to model, or are the same."""
        # With the variable, or another could get its id.
        return self._numbers.setdefault(id(variable), (len(self._numbers), variable))[0]

    def read(self, name: str, init: Callable[[], Any]) -> Any:
        """Reads a state.

        Args:
            init: Function that makes the first state, a nested structure of tensors.
        """
        if name not in self._states:
            with ops.init_scope(), ops.device(self._device):
                first = init()
                leaves = nest.flatten_with_joined_string_paths(first)
                variables = self._make({f"{name}/{path}": leaf for path, leaf in leaves})
            self._states[name] = tf.nest.map_structure(lambda _: 0, first), variables
        structure, variables = self._states[name]
        return tf.nest.pack_sequence_as(structure, [v.read_value() for v in variables])

    def variable(
        self, name: str, shape: Any, dtype: tf.DType | str, on_host: bool = False
    ) -> tf.Variable:
        """Makes a variable of zeros, to be read and written as any.

        Args:
            name: A name that is not given twice.
            shape: Its shape; the number of rows may be None, and is 0 at first.
            on_host: Whether it is on the host, and not on the replica's device.
        """
        with ops.init_scope(), ops.device("CPU:0" if on_host else self._device):
            zeros = tf.zeros([size or 0 for size in tf.TensorShape(shape).as_list()], dtype)
            return self._make({name: zeros}, tf.TensorShape(shape))[0]

    def write(self, name: str, state: Any) -> list[tf.Operation]:
        """Writes a state, which has been read before; returns the operations that do so."""
        _, variables = self._states[name]
        return [
            variable.assign(value, read_value=False)
            for variable, value in zip(variables, tf.nest.flatten(state), strict=True)
        ]

    def _make(
        self, values: Mapping[str, tf.Tensor], shape: tf.TensorShape | None = None
    ) -> list[tf.Variable]:
        values = {self._prefix + name: value for name, value in values.items()}
        forms = {name: (shape or value.shape, value.dtype) for name, value in values.items()}
        loaded = self.waiting.take(forms)
        made = {
            name: resource_variable_ops.ResourceVariable(
                loaded.get(name, value), trainable=False, shape=shape, dtype=value.dtype
            )
            for name, value in values.items()
        }
        self.variables.update(made)
        return list(made.values())


def assign(variables: Mapping[str, tf.Variable], values: Mapping[str, np.ndarray]) -> None:
    with ops.init_scope():
        for name, value in values.items():
            variables[name].assign(value)


def forms_of(variables: Mapping[str, tf.Variable]) -> dict[str, tuple[tf.TensorShape, tf.DType]]:
    return {name: (variable.shape, variable.dtype) for name, variable in variables.items()}


# State of workers under all-reduce: variables of this process's replicas.


class MirroredState(WorkerState):
    """The replicas' state: of compressors, of update rules, and momenta of those that step alone.

    Args:
        task: Name of this worker, and number of all, for files.
        is_kept: Function that tells whether compressors or update rules keep anything.
        momenta: Function of an optimizer and the number of a local replica. It returns what the
            replica has of the optimizer's variables, by names, if replicas step alone.
    """

    def __init__(
        self,
        devices: Sequence[str],
        world: World,
        control: ControlPlane | None,
        task: str,
        is_kept: Callable[[], bool],
        momenta: Callable[[keras.optimizers.Optimizer, int], dict[str, tf.Variable]],
    ) -> None:
        super().__init__()
        self._devices, self._world, self._control, self._task = devices, world, control, task
        self._is_kept, self._momenta = is_kept, momenta
        self._of_owner = weakref.WeakKeyDictionary[Any, list[ReplicaStates]]()
        self._others: dict[str, Any] = {}

    def states_of(self, owner: Any) -> list[ReplicaStates]:
        """States of an owner on each local replica."""
        if owner not in self._of_owner:
            self._of_owner[owner] = [ReplicaStates(one) for one in self._devices]
        return self._of_owner[owner]

    def add(self, name: str, owner: Any, states: ReplicaStates) -> None:
        """Has backups keep states that belong to no optimizer."""
        self._others[name], self._of_owner[owner] = owner, [states]

    def claim(self, owner: keras.optimizers.Optimizer) -> None:
        """Gives loaded values to momenta that exist by now."""
        for i, states in enumerate(self.states_of(owner)):
            momenta = self._momenta(owner, i)
            assign(momenta, states.waiting.take(forms_of(momenta), is_partial=True))

    @property
    def has_any(self) -> bool:
        return self._is_kept() or bool(self._others)

    may_keep = has_any

    @property
    def control(self) -> ControlPlane | None:
        return self._control

    @property
    def units(self) -> Sequence[int]:
        return range(self._world.rank, self._world.rank + self._world.local_replicas)

    @property
    def total(self) -> int:
        return self._world.replicas

    @property
    def layout(self) -> str:
        return f"{self._task}-with-{self.total}-replicas"

    def owners(self, model: keras.Model) -> dict[str, Any]:
        return {**super().owners(model), **self._others}

    def arrays(self, owner: Any, unit: int) -> Iterator[tuple[str, np.ndarray]]:
        replica = unit - self.units[0]
        for name, variable in self._variables(owner, replica).items():
            yield name, variable.numpy()

    def assign(
        self, owner: Any, values: Mapping[int, Mapping[str, np.ndarray]], is_strict: bool
    ) -> None:
        for i, (unit, states) in enumerate(zip(self.units, self.states_of(owner))):
            variables = self._variables(owner, i)
            assign(variables, states.waiting.put(values[unit], forms_of(variables), is_strict))

    def _variables(self, owner: Any, replica: int) -> dict[str, tf.Variable]:
        if owner in self._others.values():
            return self.states_of(owner)[0].variables if replica == 0 else {}
        return {**self._momenta(owner, replica), **self.states_of(owner)[replica].variables}
