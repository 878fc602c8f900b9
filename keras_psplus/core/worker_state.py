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
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.arguments import shown
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.core.base.optimizers import optimizers_of, unwrapped
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.jobs.control import ControlPlane


# Loaded values of states that a step has yet to make.


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


_NAME = re.compile(r"([a-z]+)-(\d+)-of-(\d+)/(.+)", re.DOTALL)


class WorkerState:
    """Base class of back ends.

    Args:
        finish_steps: Function that waits for steps that are under way.

    Attributes:
        kind: Word for what has a state of its own: a replica or a worker.
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
