"""Closure that runs one worker's share of a global step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.base.scalars import scalar_tensor
from keras_psplus.parameter_server.scheduling.closures import Closure
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.parameter_server.overlap.sync_overlap import OverlapFunctions
    from keras_psplus.parameter_server.sync.step_attempts import Attempt
    from keras_psplus.parameter_server.sync.sync_functions import SyncFunction


class ReplicaStepClosure(Closure):
    """One worker's part of an attempt.

    What it brings back is the step's vector and what pushing has counted; the vector alone, if the
    gradient came too late; and nothing, if the worker did not begin with it.

    Args:
        functions: `SyncFunction`.
        cancellation_manager: That of the coordinator's queue.
        args: Arguments of the step's function.
        attempt: `Attempt`.
        share: Number of the share.
        overlapped: `OverlapFunctions` that reads copies, instead of the step's function; or None.
        has_copies: Function of a worker's number that returns whether its copies are up to date.
    """

    after_loss = "no gradient counts twice"

    def __init__(
        self,
        functions: SyncFunction,
        cancellation_manager: Any,
        args: tuple[Any, ...],
        attempt: Attempt,
        share: int,
        overlapped: OverlapFunctions | None = None,
        has_copies: Callable[[int], bool] = lambda worker: True,
    ) -> None:
        step = functions.step if overlapped is None else overlapped.step
        super().__init__(step.concrete, cancellation_manager, args)
        self._needs_copies, self._has_copies = overlapped is not None, has_copies
        self._attempt, self._share = attempt, share
        self._push = None
        if functions.push is not None:
            self._push = cancellation_manager.get_cancelable_function(functions.push.concrete)

    def run_on(self, worker: Any) -> None:
        if self._needs_copies and not self._has_copies(worker.worker_index):
            self._attempt.is_void = True
        if self._attempt.is_over or (self._push is None and not self._is_admitted()):
            self._set(())
            return
        super().run_on(worker)
        if self._push is None:
            return
        vector, gradients = self.maybe_call_with_output_remote_value(lambda r: r._get_values())
        # Only now: what a step needs of its worker's time is what makes a gradient late.
        vector = vector.numpy()
        if not self._is_admitted():
            self._set((vector,))
            return
        with tf.device(worker.device_name), context.executor_scope(worker.executor):
            counts = self._push(scalar_tensor(self._attempt.stamp, tf.int64), gradients)
        self._set((vector, counts))

    def _is_admitted(self) -> bool:
        return self._attempt.admit(self._share)

    def _set(self, values: Any) -> None:
        self.maybe_call_with_output_remote_value(lambda r: r._set_values(values))
