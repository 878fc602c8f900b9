"""Parts of graphs.

The first step of a job takes as long as TensorFlow needs to trace a table's functions and to make
them ready, which grows with the number of their operations, branches and captured tensors.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import context


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
    """Function with a graph of its own, one operation in others, as it is."""
    made: list[Any] = []

    def call(*args: tf.Tensor) -> Any:
        if not made:
            with tf.init_scope():
                made.append(traced(function, *signature))
        with as_it_is():
            return made[0](*args)

    return call


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Context whose calls of functions have TensorFlow not optimize their graphs.

    Grappler goes through a function again for each that calls it. That would be two fifths of what
    TensorFlow needs to make a table ready, and it finds nothing in there that makes steps faster.
    """
    own = context.context()
    options = own.function_call_options
    here = _unoptimized(options.executor_type, options.config_proto_serialized)
    own.function_call_options = here
    try:
        yield
    finally:
        # Unless others were set in there.
        if own.function_call_options is here:
            own.function_call_options = options


@functools.cache
def _unoptimized(executor_type: str | None, serialized: bytes) -> Any:
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return context.FunctionCallOptions(executor_type, config)


def places_of(mask: tf.Tensor) -> tf.Tensor:
    """int64 numbers of a vector's true elements; `tf.boolean_mask` would take 25 operations."""
    return tf.reshape(tf.where(mask), [-1])
