"""Traces in which replicas cannot ask each other for sums.

A loop may turn another number of times on each replica, as one over rows does; code that is
vectorised over rows, or compiled by XLA, has no collectives.
"""

from collections.abc import Iterator

import tensorflow as tf

from keras_psplus.tf_internals import control_flow_func_graphs, control_flow_util, func_graph

# The scope in which `tf.vectorized_map` traces what it then does for all rows at once.
_VECTORIZED = "loop_body"


def loops_around(graph: tf.Graph, outermost: tf.Graph) -> list[str]:
    """Names of the loop bodies around a graph, up to an outermost graph."""
    body = control_flow_func_graphs.WhileBodyFuncGraph
    return [one.name for one in _inside(graph, outermost) if isinstance(one, body)]


def is_without_collectives(graph: tf.Graph, outermost: tf.Graph) -> bool:
    """Whether what is traced now, in a graph inside another one, can have no collectives."""
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        return True
    graphs = [*_inside(graph, outermost), outermost]
    scopes = [scope for one in graphs for scope in one.get_name_scope().split("/")]
    return any(scope.startswith(_VECTORIZED) for scope in scopes)


def _inside(graph: tf.Graph, outermost: tf.Graph) -> Iterator[tf.Graph]:
    while graph is not outermost and isinstance(graph, func_graph.FuncGraph):
        yield graph
        graph = graph.outer_graph
