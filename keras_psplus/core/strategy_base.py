"""Base class of all strategies: who they are, and the state of their workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_psplus.core.base import checks

if TYPE_CHECKING:
    import keras

    from keras_psplus.cluster.config import TaskConfig
    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.communication import Communication
    from keras_psplus.core.strategy_engine import StrategyEngine
    from keras_psplus.core.worker_state import WorkerState


class StrategyBase:
    """Base class of strategies; their constructors set the private attributes."""

    _task: TaskConfig | None
    # Arguments of the constructor, for `repr`.
    _options: dict[str, Any]
    _progress: Progress
    _communication: Communication
    _engine: Any

    def __repr__(self) -> str:
        given = [f"{n}={v!r}" for n, v in self._options.items() if v not in (None, False)]
        where = "no cluster"
        if self._task is not None:
            jobs = ", ".join(f"{len(tasks)} {job}" for job, tasks in self._task.cluster.items())
            where = f"{self._task.name} of {jobs}"
        return f"<{type(self).__name__}({', '.join(given)}): {where}>"

    @property
    def engine(self) -> StrategyEngine:
        """Engine of the strategy, a `keras_psplus.engine.Engine`."""
        engine: StrategyEngine = self._engine
        return engine

    @property
    def task(self) -> TaskConfig | None:
        """`keras_psplus.cluster.TaskConfig` of this process; None if it has none."""
        return self._task

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and logs; a chief alone runs the script."""
        return True

    @property
    def progress(self) -> Progress:
        """Progress of this process, a `keras_psplus.cluster.monitor.progress.Progress`."""
        return self._progress

    @property
    def communication(self) -> Communication:
        """Communication costs of training, a `keras_psplus.communication.Communication`."""
        return self._communication

    def state_dict(self, optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
        """Returns what workers keep from step to step for an optimizer.

        That is what `compression=` and `updates=` need: residuals, factors, sums of gradients,
        counters, and the momenta of workers that step alone. No `.keras` file holds it.
        `BackupAndRestore` saves and restores it. To save it beside checkpoints of your own, call
        `finish_updates` first if the strategy has `updates`.

        Under all-reduce, each worker has its own part: call it on all of them, and save each
        result. A chief has that of all workers.

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
