"""Loops that TensorFlow vectorizes, in which workers cannot talk to each other.

`tf.vectorized_map`, `keras.ops.vectorized_map`, `tape.jacobian` and `tape.batch_jacobian` trace one
iteration and rewrite its operations, of which collectives are none that it knows.
"""

import re

import tensorflow as tf

# The name scope of TensorFlow's parallel_for/control_flow_ops.py.
_SCOPE = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")


def is_here() -> bool:
    """Whether an iteration of such a loop is being traced."""
    return not tf.executing_eagerly() and bool(_SCOPE.search(tf.get_current_name_scope()))


def check_not_here(what: str) -> None:
    """Raises an error where an exchange would become part of such a loop.

    Raises:
        NotImplementedError: If it would.
    """
    if is_here():
        raise NotImplementedError(
            "With weights in parts, what is computed through them cannot be vectorized: workers "
            "exchange values on the way. Give `tape.jacobian` and `tape.batch_jacobian` "
            "`experimental_use_pfor=False`, take a loop in the place of `vectorized_map`, or use "
            f'MultiWorkerMirroredStrategy(shard="all"). Received: {what} in a vectorized loop'
        )
