"""Steps that `fit` and `evaluate` take one by one, with less of Python around each.

Keras puts the results of a step into an optional, to be asked whether there are any and to be taken
out of it, which are two calls of TensorFlow more; and a `tf.function` looks at what it is called
with, to find out which of its graphs is meant. Both together took 1 ms of a step of 15, in which no
worker computed.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def of_iterator(function: Callable[[Any], Any], steps_per_execution: int) -> Callable[[Any], Any]:
    """Wraps a function so that each call runs one step on an iterator.

    Args:
        function: Keras's function of an iterator, or of a list of batches.
        steps_per_execution: Steps in one call.

    Returns:
        Function of a `tf.data.Iterator` or a `tf.distribute.DistributedIterator` that returns the
        results of the last step, and raises `tf.errors.OutOfRangeError` or `StopIteration` at the
        end of the data.
    """
    return function if steps_per_execution != 1 else _SingleSteps(function)


def after_data(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step nothing of which runs before its batch is there.

    Where data end, the rest of a step would run beside what finds that out, and the optimizer would
    have counted a step.

    Args:
        step: Function of a batch.
    """

    @functools.wraps(step)
    def step_after_data(batch: Any) -> Any:
        tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies(tensors):
            return step(batch)

    return step_after_data


class _SingleSteps:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        @tf.autograph.experimental.do_not_convert
        def step(iterator: Any) -> Any:
            return function([iterator.get_next()])

        self._step = tf.function(step, reduce_retracing=True)
        self._graph: Any = None
        self._iterator: Callable[[], Any] = lambda: None

    def __call__(self, iterator: Any) -> Any:
        if tf.config.functions_run_eagerly():
            return self._step(iterator)
        if self._iterator() is not iterator:
            results = self._step(iterator)
            # Not kept alive by this: it may hold much of the data.
            self._iterator = weakref.ref(iterator)
            self._graph = self._step.get_concrete_function(iterator)
            return results
        # There is no public way to call a graph without its arguments being looked at.
        inputs = tf.nest.flatten(iterator, expand_composites=True)
        return self._graph._call_flat(inputs, self._graph.captured_inputs)
