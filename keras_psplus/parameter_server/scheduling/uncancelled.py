"""Calls of functions that the coordinator's cancelling does not reach.

TensorFlow keeps what cancels a closure where any thread's next call finds it, not only the
closure's own: an error of one closure may cancel what another thread has under way.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from keras_psplus.tf_internals import context, execute


def call(concrete: tf.types.experimental.ConcreteFunction, *args: tf.Tensor) -> list[tf.Tensor]:
    """Calls a concrete function eagerly; returns its outputs, flat.

    Args:
        concrete: Concrete function.
        args: Its arguments, tensors.
    """
    own = context.context()
    attributes = own.function_call_options.as_attrs().items()
    return execute.execute(
        concrete.name.decode(),
        num_outputs=len(concrete.outputs),
        inputs=[*args, *concrete.captured_inputs],
        attrs=tuple(itertools.chain(*attributes)),
        ctx=own,
    )
