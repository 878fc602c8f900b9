"""Operations and functions that the chief runs on a worker, and errors of lost tasks.

TensorFlow raises the same classes for a lost task and for a step's own error. What tells them apart
is the text: the job of the task whose RPC has failed, and phrases about a process that has taken a
lost one's place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

import keras_psplus
from keras_psplus.compression import wire
from keras_psplus.tf_internals import atomic_function, context, execute, executor
from keras_psplus.tf_internals import framework_ops as ops

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


@contextlib.contextmanager
def on_worker(index: int, device: str | None = "CPU:0") -> Iterator[None]:
    """Context in which operations run on a worker, one after another.

    The device None leaves that to TensorFlow, as steps do.
    """
    task = f"/job:worker/replica:0/task:{index}"
    own = executor.new_executor(enable_async=False)
    try:
        with context.executor_scope(own), tf.device(f"{task}/device:{device}" if device else task):
            yield
    finally:
        # The end of data is an error to the executor, which would raise it once more.
        own.clear_error()


def call(
    concrete: tf.types.experimental.ConcreteFunction, *args: Any, cancellation: Any = None
) -> list[tf.Tensor]:
    """Calls a concrete function eagerly; returns its outputs, flat.

    TensorFlow keeps what cancels a call where any thread's next call finds it. Here it is the
    call's own.
    """
    own, flat = context.context(), tf.nest.flatten(args, expand_composites=True)
    options = own.function_call_options.as_attrs().items()
    called = {
        "num_outputs": len(concrete.outputs),
        "inputs": [*(leaf for leaf in flat if leaf is not None), *concrete.captured_inputs],
        "attrs": tuple(itertools.chain(*options)),
        "ctx": own,
    }
    name = concrete.name.decode()
    if cancellation is None:
        return execute.execute(name, **called)
    return execute.execute_with_cancellation(name, **called, cancellation_manager=cancellation)


def with_stacks(
    concrete: tf.types.experimental.ConcreteFunction,
) -> contextlib.AbstractContextManager[None]:
    """Context that adds the lines which made an operation to the error of a call."""
    return atomic_function.InterpolateRuntimeError(concrete.inference_fn)


def to_chief(tensor: tf.Tensor) -> tf.Tensor:
    """Copies a worker's tensor into the chief's memory: workers do not talk to each other."""
    with tf.device(CHIEF):
        # `tf.identity` and `cpu` raise RuntimeError if the worker is lost.
        return tf.raw_ops.Identity(input=tensor)


# Brings tensors from one task to others in few messages.


# Below this a message costs more than its bytes.
SMALL_BYTES = 32 << 10


def send_coalesced(tensors: Sequence[tf.Tensor], devices: Sequence[str | None]) -> list[tf.Tensor]:
    """Sends tensors to other tasks: small ones to the same one in a single message.

    Whatever uses a large tensor has to be put on its device; that is where it is sent to then. A
    device is None for the worker that runs the function. Small tensors are returned on their
    devices, others as they were.
    """
    arrived = list(tensors)
    groups: dict[str | None, list[int]] = {}
    for i, (tensor, device) in enumerate(zip(tensors, devices)):
        if _is_small(tensor):
            groups.setdefault(device, []).append(i)
    for device, places in groups.items():
        if len(places) == 1:
            continue
        group = [tensors[i] for i in places]
        words = wire.pack(group)
        with tf.device(device):
            for i, tensor in zip(places, wire.unpack(words, group)):
                arrived[i] = tf.ensure_shape(tensor, tensors[i].shape)
    return arrived


def send_in_turn(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """As `send_coalesced`, but large tensors reach each device one after the other.

    All together, they would share the link, and none would be there before almost all are. The last
    ones, whose gradients come first, begin.
    """
    gated = list(tensors)
    before: dict[str, list[tf.Tensor]] = {}
    for i in reversed(range(len(tensors))):
        if _is_small(tensors[i]):
            continue
        earlier = before.setdefault(devices[i], [])
        # While one is on its way, the next one's first bytes are, too.
        with ops.control_dependencies([t.op for t in earlier[-2:-1]]), ops.device(None):
            # Not an identity, past which TensorFlow would lead the tensor.
            own = tf.raw_ops.EnsureShape(input=tensors[i], shape=tensors[i].shape)
        with tf.device(devices[i]):
            gated[i] = tf.raw_ops.EnsureShape(input=own, shape=tensors[i].shape)
        earlier.append(gated[i])
    return send_coalesced(gated, devices)


def _is_small(tensor: tf.Tensor) -> bool:
    size = tensor.shape.num_elements()
    # Of what is shorter than a byte, or complex, there are no words.
    can_be_packed = tensor.dtype.is_floating or tensor.dtype.is_integer
    return can_be_packed and size is not None and size * tensor.dtype.size <= SMALL_BYTES


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
# Modules between a library's function and the script's.
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
