"""Closure that runs one worker's share of a global step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.base.scalars import scalar_tensor
from keras_psplus.parameter_server.scheduling.closures import Closure, Run
from keras_psplus.parameter_server.tracing.remote import to_chief

if TYPE_CHECKING:
    from keras_psplus.parameter_server.overlap.sync_overlap import OverlapFunctions
    from keras_psplus.parameter_server.scheduling.remote_worker import WorkerCalls
    from keras_psplus.parameter_server.sync.step_attempts import Attempt
    from keras_psplus.parameter_server.sync.sync_functions import SyncFunction


class ReplicaStepClosure(Closure):
    """One worker's part of an attempt.

    What it brings back is the step's vector and what pushing has counted; the vector alone, if the
    gradient came too late; and nothing, if the worker did not begin with it.

    Args:
        functions: `SyncFunction`.
        args: Arguments of the step's function.
        about: As for `Closure`.
        on_done: As for `Closure`.
        attempt: `Attempt`.
        share: Number of the share.
        overlapped: `OverlapFunctions` that reads copies, instead of the step's function; or None.
        has_copies: Function of a worker's number that returns whether its copies are up to date.
    """

    after_loss = "no gradient counts twice"

    def __init__(
        self,
        functions: SyncFunction,
        args: tuple[Any, ...],
        about: str,
        on_done: Callable[[Any, Run], object],
        attempt: Attempt,
        share: int,
        overlapped: OverlapFunctions | None = None,
        has_copies: Callable[[int], bool] = lambda worker: True,
    ) -> None:
        step = functions.step if overlapped is None else overlapped.step
        super().__init__(step.concrete, args, about, on_done)
        self._needs_copies, self._has_copies = overlapped is not None, has_copies
        self._attempt, self._share = attempt, share
        self._push = functions.push.concrete if functions.push is not None else None

    def run_on(self, calls: WorkerCalls) -> Any:
        if self._needs_copies and not self._has_copies(calls.worker.index):
            self._attempt.is_void = True
        if self._attempt.is_over or (self._push is None and not self._is_admitted()):
            return ()
        if self._push is None:
            return super().run_on(calls)
        vector, gradients = super().run_on(calls)
        # Only now: what a step needs of its worker's time is what makes a gradient late.
        vector = to_chief(vector)
        if not self._is_admitted():
            return (vector,)
        return vector, calls.call(
            self._push, scalar_tensor(self._attempt.stamp, tf.int64), gradients
        )

    def _is_admitted(self) -> bool:
        return self._attempt.admit(self._share)
