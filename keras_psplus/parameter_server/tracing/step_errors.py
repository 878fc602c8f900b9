"""Short messages for errors of a step on a worker, with its batch.

TensorFlow reports the same error from the worker and from each server it spoke to, every time with
the whole stack of Keras: hundreds of lines, without the batch, and all of that a second time in its
log.
"""

import logging
import re

import tensorflow as tf

from keras_psplus.tf_internals import cluster_coordinator
from keras_psplus.tracebacks import is_library

_OF_STEPS = (
    tf.errors.InvalidArgumentError,
    tf.errors.FailedPreconditionError,
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
)
_NOT_REMOTE = "Primary device is not remote"
_FRAME = re.compile(r'^ *(File "(.*)", line \d+, in .*)$', re.MULTILINE)


class _TranslatedError:
    """Marks errors that need no further word in TensorFlow's log."""


def is_of_step(error: BaseException) -> bool:
    """Whether an error comes from what a step computes, not from the cluster."""
    return (
        isinstance(error, _OF_STEPS)
        and "have been restarted" not in error.message
        and not cluster_coordinator._is_worker_failure(error)
        and not cluster_coordinator._is_ps_failure(error)
    )


def as_loss(error: tf.errors.OpError, device_name: str) -> tf.errors.OpError:
    """Names the worker in TensorFlow's error for one on its way back.

    A function that starts while a worker is taken back finds no such device, and has not run.
    TensorFlow's coordinator knows the error as a loss, but only if its text names a worker.

    Args:
        error: What a closure has raised.
        device_name: Name of the worker, e.g. `"/job:worker/replica:0/task:0"`.

    Returns:
        `tf.errors.UnavailableError` in that case, or else the error.
    """
    if isinstance(error, tf.errors.InvalidArgumentError) and _NOT_REMOTE in error.message:
        return tf.errors.UnavailableError(None, None, f"{device_name}: {error.message}")
    return error


def translate_error(error: tf.errors.OpError, task: str, about: str) -> tf.errors.OpError:
    """The error of a step, in few words.

    Args:
        error: `tf.errors.OpError` that the step raised.
        task: Name of the worker.
        about: What the step worked on.

    Returns:
        An error of the same class.
    """
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
    kind = type(error)
    marked = type(kind.__name__, (kind, _TranslatedError), {"__module__": kind.__module__})
    return marked(None, None, "\n".join(lines))


def _without_counts(text: str) -> str:
    return re.sub(r"^\s*(\d+ root error\(s\) found\.\s*\(0\)\s*)?([A-Z_]+:)?\s*", "", text)


def _is_unreported(record: logging.LogRecord) -> bool:
    arguments = record.args if isinstance(record.args, tuple) else ()
    if any(isinstance(argument, _TranslatedError) for argument in arguments):
        return False
    # Steps that were under way are cancelled.
    return "derived error is ignored and not reported" not in str(record.msg)


tf.get_logger().addFilter(_is_unreported)
