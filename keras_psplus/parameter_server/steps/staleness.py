"""Bounded staleness: asynchronous steps of which no worker gets too far ahead of the slowest.

The chief gives each step to a worker that may begin with it. Workers do not wait for one another
beyond that: a step reads whatever updates have been made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_psplus.parameter_server.scheduling.closures import Closure
from keras_psplus.parameter_server.steps.runner import StepRunner

if TYPE_CHECKING:
    from keras_psplus.parameter_server.data.worker_data import Ticket


class BoundedRunner(StepRunner):
    """Sends train steps to the workers that may begin with one, each by itself."""

    def submit(self, batches: Any, element_spec: Any = None, ticket: Ticket | None = None) -> None:
        for batch in batches:
            super().submit([batch], element_spec)

    def _send(self, function, args, on_done, about, ticket, may_overlap):
        scheduler, clocks = self._context.scheduler, self._context.clocks
        if not scheduler.is_busy:
            clocks.settle()
        scheduler.wait_for(lambda: clocks.is_free)
        closure = _BoundedClosure(function, scheduler.cancellation_manager, args)
        closure.clocks, closure.home = clocks, clocks.give()

        def done(result, worker):
            clocks.finish(closure.home)
            on_done(result, worker)

        scheduler.start(closure, done, about, closure.home)


class _BoundedClosure(Closure):
    clocks, home = None, None

    def run_on(self, worker):
        if worker.worker_index != self.home:
            self.clocks.move(self.home, worker.worker_index)
            self.home = worker.worker_index
        super().run_on(worker)
