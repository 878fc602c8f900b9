"""Brings tensors from one task to others in few messages."""

from collections.abc import Sequence

import tensorflow as tf

from keras_psplus.compression import wire
from keras_psplus.tf_internals import framework_ops as ops

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
