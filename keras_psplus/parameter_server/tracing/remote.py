"""Operations and functions that the chief runs on a worker."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

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
