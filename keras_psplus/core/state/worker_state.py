"""State that workers keep from step to step: residuals, sums, momenta, local copies.

It belongs to an optimizer and differs from worker to worker, so that no file of Keras holds it.
Each strategy has a back end, which finds the arrays of an optimizer:

    all-reduce           variables of this process's replicas
    parameter servers    resources of remote workers, which the chief asks for

States are made when a step first needs them. Loaded values wait for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_psplus.arguments import shown
from keras_psplus.core.base.optimizers import optimizers_of, unwrapped
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.jobs.control import ControlPlane

_NAME = re.compile(r"([a-z]+)-(\d+)-of-(\d+)/(.+)", re.DOTALL)


class WorkerState:
    """Base class of back ends.

    Args:
        finish_steps: Function that waits for steps that are under way.

    Attributes:
        kind: Word for what has a state of its own: a replica or a worker.
        finish_steps: As given.
    """

    kind = "replica"

    def __init__(self, finish_steps: Callable[[], Any] = lambda: None) -> None:
        self.finish_steps = finish_steps

    # Back ends define these.

    @property
    def has_any(self) -> bool:
        """Whether there is something to save; the same on all workers."""
        raise NotImplementedError

    @property
    def may_keep(self) -> bool:
        """Whether there is something to restore, as far as arguments of the strategy tell."""
        return True

    @property
    def control(self) -> ControlPlane | None:
        """Control plane, where each process has a part of the state; else None."""
        return None

    @property
    def units(self) -> Sequence[int]:
        """Numbers of the replicas or workers whose state this process has."""
        raise NotImplementedError

    @property
    def total(self) -> int:
        """Number of all of them."""
        raise NotImplementedError

    @property
    def layout(self) -> str:
        """Beginning of the name of this process's files, which no other layout shares."""
        raise NotImplementedError

    def owners(self, model: keras.Model) -> dict[str, Any]:
        """Owners of states by names: the optimizers that a model and its methods reach."""
        return dict(optimizers_of(model))

    def arrays(self, owner: Any, unit: int) -> Iterable[tuple[str, np.ndarray]] | None:
        """Names and arrays of an owner's state on a unit; None if unreachable."""
        raise NotImplementedError

    def assign(
        self, owner: Any, values: Mapping[int, Mapping[str, np.ndarray]], is_strict: bool
    ) -> None:
        """Gives the owner's states their values, now or when a step makes them.

        Args:
            values: Dict from units to arrays by names.
            is_strict: Whether to raise ValueError for what does not fit.
        """
        raise NotImplementedError

    # Common to all back ends.

    def entries(
        self, owners: Mapping[str, Any], lost: list[int]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields names and arrays of some owners' states.

        Args:
            owners: Dict from names to owners.
            lost: List to which the units are added that cannot be reached.
        """
        for owner_name, owner in owners.items():
            for unit in self.units:
                arrays = () if unit in lost else self.arrays(owner, unit)
                if arrays is None:
                    lost.append(unit)
                    continue
                for name, array in arrays:
                    yield self._prefix(owner_name, unit) + name, array

    def by_unit(
        self, owner_name: str, arrays: Mapping[str, np.ndarray]
    ) -> dict[int, dict[str, np.ndarray]]:
        """Inverse of `entries` for one owner and the units of this process."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for unit in self.units:
            prefix = self._prefix(owner_name, unit)
            found[unit] = {
                name.removeprefix(prefix): array
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
        return found

    def state_dict(self, optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
        """Arrays of an optimizer's state by names."""
        self.finish_steps()
        lost: list[int] = []
        found = {n: np.array(a) for n, a in self.entries({"": unwrapped(optimizer)}, lost)}
        for unit in lost:
            self.warn_lost(unit)
        return found

    def load_state_dict(
        self, optimizer: keras.optimizers.Optimizer, state: Mapping[str, np.ndarray]
    ) -> None:
        """Loads what `state_dict` has returned, before the first step as well.

        Raises:
            ValueError: If it does not fit.
        """
        self._check(state)
        self.finish_steps()
        self.assign(unwrapped(optimizer), self.by_unit("", state), is_strict=True)

    def warn_lost(self, unit: int) -> None:
        """Says that a unit's state is not saved."""
        logger.warning(
            "%s-%d cannot be reached: what it has left out of its gradients is not saved",
            self.kind,
            unit,
        )

    def _prefix(self, owner_name: str, unit: int) -> str:
        of_owner = f"{owner_name}/" if owner_name else ""
        return f"{of_owner}{self.kind}-{unit}-of-{self.total}/"

    def _check(self, state: Mapping[str, np.ndarray]) -> None:
        if not isinstance(state, Mapping):
            raise ValueError(
                "`state` must be what `state_dict` has returned, a dict of arrays by names. "
                f"Received: state={shown(state)}"
            )
        units = set()
        for name in state:
            match = _NAME.fullmatch(name) if isinstance(name, str) else None
            if match is None or match[1] != self.kind:
                raise ValueError(
                    "`state` must be what `state_dict` has returned under the same strategy, whose "
                    f"names begin with {self.kind!r}. Received: a state with {shown(name)}"
                )
            if int(match[3]) != self.total:
                raise ValueError(
                    f"What workers keep is lost with another number of them: the state is one of "
                    f"{match[3]} {self.kind}s, and there are {self.total}. Leave it out, and "
                    f"training goes on with none of it. Received: a state with {name}"
                )
            units.add(int(match[2]))
        if units and not units.intersection(self.units):
            raise ValueError(
                f"Each worker loads what `state_dict` has returned on it: the state is one of "
                f"{self.kind} {min(units)}, and this process has {self.kind} {self.units[0]}. "
                f"Received: a state with {min(state)}"
            )
