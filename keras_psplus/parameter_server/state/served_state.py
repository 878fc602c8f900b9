"""State of workers under parameter servers, which the chief asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_psplus.core.state.worker_state import WorkerState

if TYPE_CHECKING:
    import keras

    from keras_psplus.parameter_server.state.worker_state import WorkerStates


class ServedState(WorkerState):
    """State of remote workers.

    Args:
        states: `WorkerStates`.
        finish_steps: Function that waits for steps that are under way.
    """

    kind = "worker"

    def __init__(self, states: WorkerStates, finish_steps: Callable[[], Any]) -> None:
        super().__init__(finish_steps)
        self._states = states

    @property
    def has_any(self) -> bool:
        return self._states.has_any

    @property
    def units(self) -> Sequence[int]:
        return range(self.total)

    @property
    def total(self) -> int:
        return self._states.num_workers

    @property
    def layout(self) -> str:
        return f"{self.total}-workers"

    def arrays(
        self, owner: keras.optimizers.Optimizer, unit: int
    ) -> Iterable[tuple[str, np.ndarray]] | None:
        fetched = self._states.fetch(unit, self._states.owner(owner))
        return None if fetched is None else fetched.items()

    def assign(
        self, owner: Any, values: Mapping[int, Mapping[str, np.ndarray]], is_strict: bool
    ) -> None:
        self._states.load(self._states.owner(owner), values, is_strict)
