"""Parts of graphs.

The first step of a job takes as long as TensorFlow needs to trace a table's functions and to make
them ready, which grows with the number of their operations, branches and captured tensors.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def traced(function: Callable[..., Any], *signature: tf.TensorSpec) -> Any:
    """Concrete function that stays one operation in the graphs of others."""
    of_graph = tf.function(
        function,
        input_signature=signature,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    # TensorFlow would warn of many functions that are called once.
    return of_graph.get_concrete_function()


def traced_once(function: Callable[..., Any], *signature: tf.TensorSpec) -> Any:
    """Function with a graph of its own, which is one operation in others."""
    made: list[Any] = []

    def call(*args: tf.Tensor) -> Any:
        if not made:
            with tf.init_scope():
                made.append(traced(function, *signature))
        return made[0](*args)

    return call


def places_of(mask: tf.Tensor) -> tf.Tensor:
    """int64 numbers of a vector's true elements; `tf.boolean_mask` would take 25 operations."""
    return tf.reshape(tf.where(mask), [-1])
