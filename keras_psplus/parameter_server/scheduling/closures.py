"""Steps as closures of TensorFlow's `ClusterCoordinator`, which say when they are done."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.engine import Call
from keras_psplus.parameter_server.tracing import step_errors
from keras_psplus.tf_internals import cluster_coordinator
from keras_psplus.tf_internals import coordinator_values as values

if TYPE_CHECKING:
    from keras_psplus.parameter_server.data.tickets import Ticket


class Closure(cluster_coordinator.Closure):
    """A closure that says when its result has been fetched, and what it was about."""

    about: str
    scheduler: Any
    ticket: Ticket | None
    tried_on: int | None
    started: float | None
    # The worker that it counts for, or None if `Clocks` did not choose one.
    home: int | None

    about, scheduler, ticket = "", None, None
    may_overlap = False
    after_loss = "its update may be applied twice"
    tried_on, started, home = None, None, None

    def __init__(
        self, function: Callable[..., Any], cancellation_manager: Any, args: tuple[Any, ...]
    ) -> None:
        # TensorFlow would work out the outputs' types again for each closure.
        self._args = args
        self._kwargs: dict[str, Any] = {}
        self._function = cancellation_manager.get_cancelable_function(function)
        self._output_type_spec = None
        self._output_remote_value_ref: weakref.ref[_Result] | None = None

    def execute_on(self, worker: Any) -> None:
        index = worker.worker_index
        self.scheduler.note_start(self, index)
        try:
            if self.ticket is not None:
                self._args = (*self._args[:-1], self.ticket.payload_on(index))
            self.run_on(worker)
        except tf.errors.OpError as raised:
            error = step_errors.as_loss(raised, worker.device_name)
            if not step_errors.is_of_step(error):
                raise error from None
            raise step_errors.translate_error(error, f"worker-{index}", self.about) from None

    def run_on(self, worker: Any) -> None:
        """Runs the function and sets the result."""
        super().execute_on(worker)

    def build_result(
        self, on_fetched: Callable[..., None], on_done: Callable[[Any, int], None]
    ) -> _Result:
        result = _Result(None, self._output_type_spec)
        result.on_fetched = lambda: on_fetched(result, on_done, self.tried_on)
        self._output_remote_value_ref = weakref.ref(result)
        return result


class _Result(values.RemoteValueImpl):
    on_fetched: Callable[[], None] | None = None

    def get(self):
        fetched = super().get()
        self._notify()
        return fetched

    def _set_error(self, error):
        super()._set_error(error)
        self._notify()

    def _notify(self):
        on_fetched, self.on_fetched = self.on_fetched, None
        if on_fetched is not None:
            on_fetched()


class Coordinator(cluster_coordinator.ClusterCoordinator):
    """TensorFlow's coordinator, but the process can end while a worker is lost.

    Args:
        strategy: `tf.distribute.ParameterServerStrategy`; it has one coordinator.
    """

    def __del__(self):
        # TensorFlow's `stop` asks for a lock which is held for as long as a lost worker is waited
        # for.
        handler = self._cluster.failure_handler
        handler._should_preemption_thread_run = False
        handler._cluster_due_for_update_or_finish.set()
        handler._end = _End()
        super().__del__()


class _End:
    """End of TensorFlow's handler of lost workers, which has been told already."""

    def leave(self, call: Call) -> None:
        """`WorkerPreemptionHandler.stop`: nothing is left to do."""
