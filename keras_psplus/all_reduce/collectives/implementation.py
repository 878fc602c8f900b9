"""The implementation of collectives between GPUs: NCCL, or TensorFlow's own rings.

Left to itself, TensorFlow never chooses NCCL. NCCL in turn refuses two replicas on one GPU.
"""

from __future__ import annotations

import collections
import ctypes.util
import importlib.util
import json
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.cluster import environment
from keras_psplus.compression import wire
from keras_psplus.log import logger

if TYPE_CHECKING:
    from keras_psplus.core.jobs.control import ControlPlane


# Sums on GPUs of the dtypes for which TensorFlow has no all-reduce there.
#
# It refuses int32 and bfloat16 ("Collective all-reduce does not support datatype DT_BFLOAT16 on
# DEVICE_GPU"), by NCCL and by its own rings; on CPUs it has both.


_Collective = Callable[[tf.Tensor], tf.Tensor]
DTYPES = tf.int32, tf.bfloat16


def all_reduce(
    tensor: tf.Tensor,
    replicas: int,
    reduce: _Collective,
    all_to_all: _Collective,
    gather: _Collective,
) -> tf.Tensor:
    """Sums an int32 or bfloat16 tensor over the replicas of a group.

    Integers travel as int64. Floats keep their two bytes: each replica adds up, in float32, the
    elements of one share, and all gather the shares, which is as many bytes as in a ring.

    Args:
        tensor: Tensor of one shape on all replicas.
        reduce: All-reduce of a tensor of another dtype.
        all_to_all: Exchange of rows, one for each replica.
        gather: Concatenation of the replicas' tensors along axis 0.
    """
    if tensor.dtype == tf.int32:
        return tf.cast(reduce(tf.cast(tensor, tf.int64)), tf.int32)
    if not tensor.shape.num_elements():
        return tf.cast(reduce(tf.cast(tensor, tf.float32)), tf.bfloat16)
    sent = to_shares(tensor, replicas)
    total = sum_of_shares(tf.ensure_shape(all_to_all(sent), sent.shape))
    return from_shares(tf.ensure_shape(gather(total), sent.shape), tensor.shape)


def to_shares(tensor: tf.Tensor, replicas: int) -> tf.Tensor:
    """Cuts a bfloat16 tensor into a row of float32 words for each replica."""
    elements = tensor.shape.num_elements()
    missing = -elements % (2 * replicas)
    flat = tf.concat([tf.reshape(tensor, [-1]), tf.zeros([missing], tensor.dtype)], 0)
    return wire.pack((flat,), replicas)


def sum_of_shares(words: tf.Tensor) -> tf.Tensor:
    """Adds up what `to_shares` has made on each replica; returns a row of words."""
    replicas, size = words.shape
    like = tf.zeros([replicas, 2 * size], tf.bfloat16)
    (shares,) = wire.unpack(words, (like,), replicas)
    return wire.pack((tf.cast(tf.reduce_sum(tf.cast(shares, tf.float32), 0), tf.bfloat16),))


def from_shares(words: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    rows, size = words.shape
    (flat,) = wire.unpack(words, (tf.zeros([rows * 2 * size], tf.bfloat16),), rows)
    return tf.reshape(flat[: shape.num_elements()], shape)


_Implementation = tf.distribute.experimental.CommunicationImplementation


def choose(given: Any, devices: list[str], control: ControlPlane | None) -> Any:
    """The options for the collectives between replicas; to be called on all workers.

    Where the user leaves the implementation open, it is NCCL if each replica has a GPU of its own,
    and TensorFlow's ring otherwise. The chief logs which.

    Args:
        given: The user's `tf.distribute.experimental.CommunicationOptions`.

    Raises:
        ValueError: If workers have devices of different kinds or numbers.
    """
    kind = tf.DeviceSpec.from_string(devices[0]).device_type
    if control is not None:
        said = f"{len(devices)} x {kind}"
        control.check_same("devices", said, f"{said}: each worker needs as many GPUs as the first")
    if kind != "GPU" or given.implementation != _Implementation.AUTO:
        return given
    mine = json.dumps(_own_gpus(len(devices)))
    texts = [mine] if control is None else control.exchange("GPUs", mine)
    found = [gpu for text in texts for gpu in json.loads(text)]
    if len(found) == 1:
        return given
    reason = _why_not_nccl(found)
    if control is None or control.task.name == control.names[0]:
        how = f"TensorFlow's ring, as {reason}" if reason else "NCCL"
        logger.info("gradients travel between %d GPUs by %s", len(found), how)
    implementation = _Implementation.RING if reason else _Implementation.NCCL
    return tf.distribute.experimental.CommunicationOptions(
        given.bytes_per_pack, given.timeout_seconds, implementation
    )


def _own_gpus(replicas: int) -> list[str]:
    """Name of the GPU that each replica of this process uses."""
    host = socket.gethostname()
    physical = tf.config.get_visible_devices("GPU")
    if len(physical) != replicas:
        return [f"GPU 0 of {host}"] * replicas  # logical devices, which share one
    names = environment.named()
    numbers = [int(device.name.rpartition(":")[2]) for device in physical]
    return [f"GPU {names[number] if names else number} of {host}" for number in numbers]


def _why_not_nccl(names: Iterable[str]) -> str | None:
    name, replicas = collections.Counter(names).most_common(1)[0]
    if replicas > 1:
        return f"{replicas} replicas share {name}"
    if not (ctypes.util.find_library("nccl") or _is_installed("nvidia.nccl")):
        return "there is no libnccl.so.2: pip install nvidia-nccl-cu12"
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
