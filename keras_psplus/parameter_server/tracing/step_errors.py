"""Short messages for errors of a step on a worker, with its batch.

TensorFlow reports the same error from the worker and from each server it spoke to, every time with
the whole stack of Keras: hundreds of lines, without the batch.
"""

import re

import tensorflow as tf

from keras_psplus.parameter_server.tracing.losses import is_server_loss, is_worker_loss
from keras_psplus.tracebacks import is_library

_OF_STEPS = (
    tf.errors.InvalidArgumentError,
    tf.errors.FailedPreconditionError,
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
)
_FRAME = re.compile(r'^ *(File "(.*)", line \d+, in .*)$', re.MULTILINE)


def is_of_step(error: BaseException) -> bool:
    """Whether an error comes from what a step computes, not from the cluster."""
    return (
        isinstance(error, _OF_STEPS)
        and "have been restarted" not in error.message
        and not is_worker_loss(error)
        and not is_server_loss(error)
    )


def translate_error(error: tf.errors.OpError, task: str, about: str) -> tf.errors.OpError:
    """The error of a step, in few words, of the same class."""
    text = error.message
    first_stack = text.split("Detected at node", 2)[1:2]
    frames = _FRAME.findall("".join(first_stack))
    frames = [frame for frame, path in frames if not is_library(path)]
    rest = text[max((m.end() for m in _FRAME.finditer(text)), default=0) :]
    cause = re.split(r"\[\[|Additional GRPC|\n\s*\(1\)", _without_counts(rest))[0].strip()
    node = re.search(r"\{\{node ([^}]+)\}\}", rest)
    lines = [
        cause or text.splitlines()[0],
        f"In {node.group(1)}, run by {task}." if node else f"On {task}.",
        *(f"  {frame}" for frame in frames),
        f"Training has stopped. Received: {about}",
    ]
    return type(error)(None, None, "\n".join(lines))


def _without_counts(text: str) -> str:
    return re.sub(r"^\s*(\d+ root error\(s\) found\.\s*\(0\)\s*)?([A-Z_]+:)?\s*", "", text)
