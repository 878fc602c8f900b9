"""The barrier between a step's pushes and the next one's lookups."""

import tensorflow as tf

from keras_psplus.hybrid.tables.prefetch import Barrier


class Extended:
    def __init__(self):
        self._variable = tf.Variable(1.0)

    def step_variable(self, name):
        return self._variable


def depends_on(tensor, operation):
    """Whether a tensor is there after an operation alone, by the edges of the graph."""
    found, pending = set(), [tensor.op]
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            pending += [one.op for one in op.inputs] + list(op.control_inputs)
    return operation in found


def test_replicas_arrive_once_servers_have_answered_and_leave_once_all_are_there():
    barrier, found = Barrier(Extended()), {}

    @tf.function(autograph=False)
    def step():
        found["answer"] = tf.numpy_function(lambda: 1.0, [], tf.float64)
        barrier.note_pushed([found["answer"]])
        found["token"], found["early"] = barrier.token(), barrier.passed()
        found["total"] = tf.numpy_function(lambda one: one, [found["token"]], tf.float32)
        barrier.release(found["total"])
        found["passed"] = barrier.passed()

    # TensorFlow orders what reads and writes a variable when the trace ends.
    step.get_concrete_function()
    assert depends_on(found["token"], found["answer"].op)
    assert depends_on(found["passed"], found["total"].op)
    assert not depends_on(found["early"], found["total"].op)
