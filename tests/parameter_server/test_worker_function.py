"""Copies of the chief's state in functions of workers."""

import tensorflow as tf

from keras_psplus.parameter_server.worker_function import ClosureVariable, Trace, current_trace
from tests.support.tables import for_each


@for_each("steps", [1, 2, 32])
def test_state_that_steps_replace_is_known_of_any_number_of_them(steps):
    added, assigned, replaced = (ClosureVariable(tf.Variable(1.0), "total") for _ in range(3))
    traces = []

    @tf.function
    def take_steps(initial):
        trace = Trace(initial)
        traces.append(trace)
        with current_trace.being(trace):
            for _ in range(steps):
                added.assign_add(2.0)
                # As a Keras variable adds.
                assigned.assign(assigned.read_value() + added.read_value())
                replaced.assign(added.read_value() * 3.0)
            return trace.changes()

    changes = take_steps(tf.ones([3], tf.float64)).numpy()
    assert [id(v) for v in traces[0].overwritten()] == [id(replaced)]
    total, sums = 1.0, 1.0
    for _ in range(steps):
        total, sums = total + 2.0, sums + total + 2.0
    assert changes.tolist() == [total - 1.0, sums - 1.0, 3.0 * total - 1.0]
