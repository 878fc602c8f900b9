"""Lets only those call a server's methods who can name the job's two secret integers.

Calls for rows are operations of a step's graph, so that the server compares in a graph as well. A
session in Python, as control calls have one, would cost each of them more than its rows do.
"""

import tensorflow as tf

from keras_psplus.cluster.secret import Secret
from keras_psplus.tf_internals import resource_variable_ops

_PURPOSE = "rows"


class RowKey:
    """Two integers that a call for rows begins with.

    They follow from the job's token and from the first process of a server, so that one that takes
    its place goes on with them. A variable holds them, as constants would be in saved graphs.

    Args:
        secret: `secret.Secret`.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        with tf.init_scope(), tf.device("/CPU:0"):
            self._variable = resource_variable_ops.ResourceVariable(
                tf.zeros([2], tf.int64), trainable=False
            )

    def set(self, process: str) -> None:
        """Makes it that of a server's process."""
        with tf.init_scope():
            self._variable.assign(tf.constant(self._secret.key_words(_PURPOSE, process), tf.int64))

    def read(self) -> tf.Tensor:
        """The integers, as a tensor."""
        return self._variable.read_value()


def with_key_check(
    function: tf.types.experimental.PolymorphicFunction, key: RowKey
) -> tf.types.experimental.PolymorphicFunction:
    """A method that does what another one does, for those who know the key.

    Args:
        function: `tf.function` with a signature, which is not called if the key is wrong.
        key: `RowKey`.
    """

    @tf.function(
        input_signature=[tf.TensorSpec([2], tf.int64), *function.input_signature], autograph=False
    )
    def method(given: tf.Tensor, *args: tf.Tensor) -> tf.Tensor:
        is_right = tf.reduce_all(tf.equal(given, key.read()))
        refusal = "the caller does not know this job's token. Received: a call without its key"
        with tf.control_dependencies([tf.debugging.Assert(is_right, [refusal])]):
            return function.python_function(*[tf.identity(arg) for arg in args])

    return method
