"""Readings of a clock in a function's graph."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from keras_psplus.tf_internals import framework_ops as ops


def time_after(operations: Iterable[tf.Tensor | tf.Operation]) -> tf.Tensor:
    """Time at which some operations are done, whatever else the graph does."""
    with tf.control_dependencies(list(operations)):
        now = tf.timestamp()
    run_apart(now.op)
    return now


def run_apart(operation: tf.Operation) -> None:
    """Keeps TensorFlow from running an operation after all stateful ones that were made before."""
    manager = ops.get_default_graph().experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)
