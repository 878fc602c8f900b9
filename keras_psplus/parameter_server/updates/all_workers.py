"""Has every worker run a function once, between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.parameter_server.scheduling.closures import Closure, Run
from keras_psplus.parameter_server.steps.step_functions import StepFunctions
from keras_psplus.parameter_server.tracing.worker_function import Trace, pack

if TYPE_CHECKING:
    import numpy as np

    from keras_psplus.parameter_server.context import StepContext


class AllWorkersFunction:
    """Runs a function on all workers that can be reached.

    Args:
        context: The strategy's `StepContext`.
        function: Function without arguments, of which the graph is made once, as of a step.
        collect: Function of the `Trace` that returns a float64 vector.
    """

    def __init__(
        self,
        context: StepContext,
        function: Callable[[], Any],
        collect: Callable[[Trace], tf.Tensor],
    ) -> None:
        self._context = context
        self._functions = StepFunctions(
            context,
            lambda nothing: function(),
            lambda trace, results: (collect(trace), (), ()),
            lambda: (),
        )

    def __call__(self, on_done: Callable[[np.ndarray, int], None]) -> None:
        """Runs the function, and waits until it is done.

        Args:
            on_done: Called with the vector of each worker and the worker's number.
        """
        context, scheduler = self._context, self._context.scheduler
        scheduler.join()
        function, payload = self._functions([()])

        def done(result: Any, run: Run) -> None:
            vector, _ = function.add_costs(result[0], context.totals)
            on_done(vector, run.worker)

        for worker in sorted(set(range(context.num_workers)) - scheduler.queue.lost):
            arguments = tf.constant(pack(function.variables)), payload
            closure = Closure(function.concrete, arguments, "finishing its updates", done)
            closure.after_loss = "what it was to finish is gone"
            scheduler.queue.put(closure, worker)
        scheduler.join()
