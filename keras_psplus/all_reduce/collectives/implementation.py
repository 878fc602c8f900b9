"""The implementation of collectives between GPUs: NCCL, or TensorFlow's own rings.

Left to itself, TensorFlow never chooses NCCL. NCCL in turn refuses two replicas on one GPU.
"""

from __future__ import annotations

import collections
import ctypes.util
import importlib.util
import json
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.cluster import gpus
from keras_psplus.log import logger

if TYPE_CHECKING:
    from keras_psplus.core.jobs.control import ControlPlane

_Implementation = tf.distribute.experimental.CommunicationImplementation


def choose(given: Any, devices: list[str], control: ControlPlane | None) -> Any:
    """The options for the collectives between replicas; to be called on all workers.

    Where the user leaves the implementation open, it is NCCL if each replica has a GPU of its own,
    and TensorFlow's ring otherwise. The chief logs which.

    Args:
        given: The user's `tf.distribute.experimental.CommunicationOptions`.
        devices: Names of this worker's devices.
        control: The control plane between workers; None if there is one.

    Returns:
        `given`, with an implementation.

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
    names = gpus.named()
    numbers = [int(device.name.rpartition(":")[2]) for device in physical]
    return [f"GPU {names[number] if names else number} of {host}" for number in numbers]


def _why_not_nccl(names: Iterable[str]) -> str | None:
    """The reason why NCCL cannot be used, or None."""
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
