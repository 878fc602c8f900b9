"""Logs computed from metrics: which can be computed once more, and what is said of the others."""

import pytest
import tensorflow as tf

from keras_psplus.core.graph.metrics import MetricLogs, refuse


def logs_of(step):
    """The `MetricLogs` of a step that gets the state of a metric and returns one log, "twice"."""
    state = tf.Variable(1.0)
    graph = tf.function(lambda: step(state), autograph=False).get_concrete_function().graph
    return MetricLogs({"twice": graph.outputs[0]}, [graph.inputs[0]])


def after_update(state):
    state.assign_add(1.0)
    return 2 * state.read_value()


def before_update(state):
    twice = 2 * state.read_value()
    state.assign_add(1.0)
    return tf.identity(state.read_value() + twice)


def in_function(state):
    return tf.function(after_update, autograph=False)(state)


def at_random(state):
    state.assign_add(1.0)
    return tf.random.poisson([], state.read_value())


def test_a_log_of_the_last_state_is_computed_once_more():
    logs = logs_of(after_update)
    assert logs.names == ["twice"]
    refuse(logs.refused)


@pytest.mark.parametrize(
    "step, why",
    [
        (in_function, "in a function that changes the metric"),
        (at_random, r"not to be run twice \(.*Poisson"),
    ],
)
def test_a_log_that_cannot_be_is_refused_by_name(step, why):
    logs = logs_of(step)
    assert logs.names == []
    with pytest.raises(ValueError, match=f"The log 'twice' .*{why}.*Received: the log 'twice'"):
        refuse(logs.refused)


def test_a_log_of_a_state_that_changes_later_is_refused():
    state = tf.Variable(1.0)
    graph = tf.function(lambda: before_update(state), autograph=False).get_concrete_function().graph
    logs = MetricLogs(
        {"twice": graph.outputs[0]}, [graph.inputs[0]], can_read=lambda read: read.is_last
    )
    with pytest.raises(ValueError, match="updated after it is read"):
        refuse(logs.refused)
