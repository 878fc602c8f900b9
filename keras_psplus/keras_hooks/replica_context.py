"""What layers and users' steps ask of all replicas: one without rows of its own adds none.

It computes with a row that does not count, see `all_reduce.padding`. Gradients of such sums and
gathers are sums as well, and pass here.
"""

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from keras_psplus.keras_hooks.ownership import our_step
from keras_psplus.keras_hooks.patching import replace


def install():
    """Installs this module's hooks."""
    replace(distribute_lib.ReplicaContextBase, "all_reduce", ["self", "reduce_op", "value"])(
        _all_reduce
    )
    replace(distribute_lib.ReplicaContext, "all_gather", ["self", "value", "axis"])(_all_gather)


def _all_reduce(original, self, reduce_op, value, *args, **kwargs):
    step = our_step()
    if step is not None and step.may_be_empty and _is_sum(reduce_op):
        value = tf.nest.pack_sequence_as(value, step.zero_if_empty(tf.nest.flatten(value)))
    return original(self, reduce_op, value, *args, **kwargs)


def _all_gather(original, self, value, axis, *args, **kwargs):
    step = our_step()
    if step is not None and axis == 0:
        value = tf.nest.map_structure(
            lambda t: t if _is_count(t) else step.rows_if_any(tf.convert_to_tensor(t)), value
        )
    return original(self, value, axis, *args, **kwargs)


def _is_sum(reduce_op):
    name = reduce_op if isinstance(reduce_op, str) else reduce_op.value
    return name.upper() == tf.distribute.ReduceOp.SUM.value


def _is_count(tensor):
    # TensorFlow gathers the numbers of rows, to find a replica's part of a gradient.
    return tf.is_tensor(tensor) and tensor.dtype == tf.int32 and tensor.shape == (1,)
