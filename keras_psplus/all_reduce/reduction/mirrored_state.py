"""State of workers under all-reduce: variables of this process's replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates, assign, forms_of
from keras_psplus.core.state.worker_state import WorkerState

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.batch.batches import World
    from keras_psplus.core.jobs.control import ControlPlane


class MirroredState(WorkerState):
    """The replicas' state: of compressors, of update rules, and momenta of those that step alone.

    Args:
        devices: Devices of the local replicas.
        world: Their position among all replicas.
        control: Control plane between workers, or None.
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
