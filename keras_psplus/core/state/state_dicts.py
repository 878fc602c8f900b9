"""`state_dict` and `load_state_dict`, the same on every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from keras_psplus.core.base import checks

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.state.worker_state import WorkerState
    from keras_psplus.core.strategy_engine import StrategyEngine


class StateDicts:
    """Base class of strategies with state of workers; their engines have `worker_state`."""

    @property
    def engine(self) -> StrategyEngine:
        """Engine of the strategy."""
        raise NotImplementedError

    def state_dict(self, optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
        """Returns what workers keep from step to step for an optimizer.

        That is what `compression=` and `updates=` need: residuals, factors, sums of gradients,
        counters, and the momenta of workers that step alone. No `.keras` file holds it.
        `BackupAndRestore` saves and restores it. To save it beside checkpoints of your own, call
        `finish_updates` first if the strategy has `updates`.

        Under all-reduce, each worker has its own part: call it on all of them, and save each
        result. A chief has that of all workers, or stages.

        Args:
            optimizer: The model's optimizer.

        Returns:
            Dict from names to NumPy arrays; empty if nothing is kept, or before the first step.

        Raises:
            ValueError: If it is no optimizer of this strategy.

        Example:

        ```python
        state = strategy.state_dict(model.optimizer)
        np.savez(f"{folder}/state-{strategy.task.name}.npz", **state)
        ```
        """
        return self._state_of(optimizer).state_dict(optimizer)

    def load_state_dict(
        self, optimizer: keras.optimizers.Optimizer, state: Mapping[str, np.ndarray]
    ) -> None:
        """Goes on from what `state_dict` has returned, also before the first step.

        Under all-reduce, call it on all workers, on each with its own result. States are made by
        the first step, which then raises for values that do not fit.

        Args:
            optimizer: The model's optimizer.
            state: Mapping from names to arrays, such as `np.load` returns.

        Raises:
            ValueError: If it is no optimizer of this strategy, or the state is one of another
                number of workers, of another model, compressor or `updates`, or lacks a name.

        Example:

        ```python
        with np.load(f"{folder}/state-{strategy.task.name}.npz") as state:
            strategy.load_state_dict(model.optimizer, state)
        ```
        """
        self._state_of(optimizer).load_state_dict(optimizer, state)

    def _state_of(self, optimizer: keras.optimizers.Optimizer) -> WorkerState:
        checks.check_optimizer(optimizer)
        if optimizer._distribution_strategy is not self:
            checks.refuse_optimizer(optimizer)
        state: WorkerState = self.engine.worker_state
        return state
