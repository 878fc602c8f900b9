"""Files of the workers' state, written by the chief beside a backup."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.backup.worker_files import (
    WorkerFiles,
    digests_of,
    folder_in,
    number_of_steps,
    problems_of,
    remove,
)
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.log import logger
from keras_psplus.parameter_server.state import state_files

if TYPE_CHECKING:
    import keras

    from keras_psplus.parameter_server.context import StepContext

# More than all workers together can have accumulated.
_MANY = 1 << 20
# Grace period: the launcher may still be ending this job.
_UNREACHABLE_SECONDS = 60.0


class ServedWorkerFiles(WorkerFiles):
    """Worker files of parameter servers: the chief fetches states and writes the files.

    Args:
        context: The strategy's `StepContext`.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context.strategy)
        self._context = context
        self._unreachable_since: float | None = None

    def save(
        self,
        model: keras.Model,
        folder: str,
        what: str,
        names_in_use: Callable[[], Iterable[str] | None],
        make_folder: Callable[..., Any] | None = None,
        waits: bool = False,
    ) -> dict[str, str] | None:
        context = self._context
        context.scheduler.join()
        states, place = context.extended.worker_states, folder_in(folder)
        if not states.has_any:
            return {}
        before, step = state_files.steps(place), self._number_of_batches(model)
        while step in before.values():
            step += 1
        names: list[str] = []
        try:
            names, unreachable = state_files.write(states, context.num_workers, place, step)
            if self._is_too_early(unreachable):
                remove(names, folder)
                logger.warning(
                    "nothing is saved now, as worker-%d cannot be reached, and what it has left "
                    "out of its gradients would be missing; what was saved before stays",
                    unreachable[0],
                )
                return None
            for worker in unreachable:
                state_files.warn_unreachable(worker)
            files = digests_of(names, folder)
        except (OSError, tf.errors.OpError) as error:
            with contextlib.suppress(OSError, tf.errors.OpError):
                new = [n for n in tf.io.gfile.listdir(place) if f"_step_{step}.npz" in n]
                remove(new, folder)
            raise OSError(self._problem(folder, error)) from error
        in_use = names_in_use()
        if in_use is not None:
            with contextlib.suppress(OSError, tf.errors.OpError):
                remove(set(before).difference(in_use), folder)
        return files

    def problems(self, folder: str, saved: Sequence[dict[str, str]]) -> list[list[str]]:
        return [problems_of(files, folder) for files in saved]

    def _read(self, model, folder, files):
        steps = state_files.steps(folder_in(folder))
        for step in {steps[name] for name in files}:
            self._strategy.restore_compression_state(folder_in(folder), step)

    def _is_too_early(self, unreachable):
        """Whether to wait for workers that cannot be reached rather than go on without them."""
        if self._unreachable_since is None:
            self._unreachable_since = time.monotonic()
        if not unreachable:
            self._unreachable_since = None
            return False
        return time.monotonic() - self._unreachable_since < _UNREACHABLE_SECONDS

    def _number_of_batches(self, model):
        """A number that grows with every batch."""
        if self._strategy.updates is None:
            return sum(int(one._iterations.numpy()) for one in optimizers_of(model).values())
        return number_of_steps(model) * _MANY + sum(self._context.updating.pending.values())
