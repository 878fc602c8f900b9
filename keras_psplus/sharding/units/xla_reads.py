"""Weights that functions for XLA read, which are gathered before each call of these.

XLA itself cannot gather on CPUs. Keras computes grouped convolutions in such a function there, and
a layer may have one of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.graph.compiled_function import is_in_gradient_of
from keras_psplus.sharding.units.functions import CONTROL_FLOW, UnitFunction
from keras_psplus.tf_internals import control_flow_util, framework_ops

if TYPE_CHECKING:
    from keras_psplus.sharding.weight import PartOfWeight


def function_here() -> Any:
    """The function that is being traced, if one for XLA calls it; or None."""
    graph = framework_ops.get_default_graph()
    while isinstance(graph, CONTROL_FLOW):
        graph = graph.outer_graph
    # The call of a function for XLA marks the graph that it is made in.
    outer = getattr(graph, "outer_graph", None)
    is_for_xla = outer is not None and control_flow_util.GraphOrParentsInXlaContext(outer)
    return graph if is_for_xla else None


def given_by_calls(weight: PartOfWeight) -> tf.Tensor | None:
    """The whole of a weight, as each call of a function for XLA reads it.

    Steps share the functions of layers: what one step has gathered is of no use in another.

    Returns:
        The function's own tensor; None where none for XLA is being traced.
    """
    # Gradients of units have it from what has called these.
    if is_in_gradient_of(UnitFunction.kind):
        return None
    if is_in_gradient_of(*(f"{name}_" for name in weight.given_to)):
        raise ValueError(
            "`keras.remat` cannot gather weights inside of a function that XLA compiles: call the "
            "function in what `keras.remat` is given, or make it without `jit_compile=True`. "
            f"Received: a gradient that computes with '{weight.path}' once more"
        )
    function = function_here()
    if function is None:
        return None
    weight.given_to.add(function.name)
    captures, key = function.function_captures, ("whole weight", id(weight))
    if key not in captures.by_ref_internal:

        def read() -> tf.Tensor:
            with tf.control_dependencies(None):
                return weight.value()

        spec = tf.TensorSpec(weight.shape, weight.dtype)
        with tf.control_dependencies(None):
            function.capture_call_time_value(read, spec, key=key)
        # TensorFlow would have all functions around be given it, up to the step's own.
        captures.by_ref_external[key] = read
    whole: tf.Tensor = captures.by_ref_internal[key]
    return whole
