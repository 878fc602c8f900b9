"""Errors of lost workers and parameter servers, told apart from a step's own.

TensorFlow raises the same classes for both. What tells them apart is the text: the job of the task
whose RPC has failed, and phrases about a process that has taken a lost one's place.
"""

import contextlib
import os
import pathlib
import re
import threading

import keras
import tensorflow as tf

import keras_psplus

_FROM_SERVER = "GRPC error information from remote target /job:ps"
_WORKER = "/job:worker"
# Of a process that has taken the address of a lost one before any RPC has failed, or that the chief
# is just about to connect to.
_RESTARTED = (
    *("unknown device", "unable to find the relevant tensor remote_handle"),
    "client for target /job:worker",
)
# Of a tensor of a lost worker that TensorFlow has been made to forget.
_FORGOTTEN = "Assigned device '/job:worker"
# Of a function that starts while a worker is taken back; it has not run.
_NOT_REMOTE = "Primary device is not remote"
_NOT_REGISTERED = "is neither a type of a primitive operation nor a name of a function registered"


def is_server_loss(error: BaseException) -> bool:
    """Whether an error says that a parameter server is lost, or cannot be reached."""
    if _FROM_SERVER not in str(error):
        return False
    return isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)) or (
        isinstance(error, tf.errors.InvalidArgumentError) and _is_restarted(error)
    )


def is_worker_loss(error: BaseException) -> bool:
    """Whether an error says that a worker is lost, or was started again."""
    text = str(error)
    if _WORKER not in text or _FROM_SERVER in text:
        return False
    if isinstance(error, tf.errors.InvalidArgumentError):
        return _is_restarted(error) or _NOT_REMOTE in text
    if isinstance(error, tf.errors.InternalError):
        return _FORGOTTEN in text
    if isinstance(error, tf.errors.NotFoundError):
        return _NOT_REGISTERED in text
    if isinstance(error, TypeError):
        return "Binding inputs to tf.function" in text
    return isinstance(
        error, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
    )


def is_of_worker(error: BaseException) -> bool:
    """Whether an operation of the chief has failed as its worker is unreachable or new."""
    if not isinstance(error, tf.errors.OpError):
        return False
    # Of something that was on a worker before it was started again.
    restarted = "have been restarted" in error.message or "invalid device" in error.message
    return restarted or is_worker_loss(as_loss(error, _WORKER))


def as_loss(error: tf.errors.OpError, device_name: str) -> tf.errors.OpError:
    """Names the worker in an error of its connection, which may name none.

    Args:
        error: What a closure has raised; it is returned if it is another one.
        device_name: Name of the worker, e.g. `"/job:worker/replica:0/task:0"`.
    """
    is_lost = isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError))
    if isinstance(error, tf.errors.InvalidArgumentError):
        is_lost = _is_restarted(error) or _NOT_REMOTE in error.message
    # An operation of a step names its node, and a connection to another task that task.
    if is_lost and "{{" not in error.message and "/job:" not in error.message:
        return tf.errors.UnavailableError(None, None, f"{device_name}: {error.message}")
    return error


def _is_restarted(error: BaseException) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in _RESTARTED)


# Short messages for errors of a step on a worker, with its batch.
#
# TensorFlow reports the same error from the worker and from each server it spoke to, every time
# with the whole stack of Keras: hundreds of lines, without the batch.


_OF_STEPS = (
    tf.errors.InvalidArgumentError,
    tf.errors.FailedPreconditionError,
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
)
_FRAME = re.compile(r'^ *(File "(.*)", line \d+, in .*)$', re.MULTILINE)

_LIBRARIES = [
    str(pathlib.Path(str(m.__file__)).resolve().parent) for m in (tf, keras, keras_psplus)
]
# What a library's function comes through on the way to the script's.
_BETWEEN = [str(pathlib.Path(str(m.__file__)).resolve()) for m in (contextlib, threading)]


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
    frames = [frame for frame, path in frames if not _is_library(path)]
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


def _is_library(path: str) -> bool:
    """Whether a file is one of TensorFlow, Keras or this library."""
    path = str(pathlib.Path(path).resolve())
    return path in _BETWEEN or any(path.startswith(folder + os.sep) for folder in _LIBRARIES)


def _without_counts(text: str) -> str:
    return re.sub(r"^\s*(\d+ root error\(s\) found\.\s*\(0\)\s*)?([A-Z_]+:)?\s*", "", text)
