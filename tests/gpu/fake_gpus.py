"""Logical CPU devices that the library takes for GPUs, so that it chooses what it does on GPUs."""

from unittest import mock

import tensorflow as tf

from keras_psplus.all_reduce.collectives.operations import Launcher
from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.pipeline import strategy

_JOB = "/job:localhost/replica:0/task:0"
_list_logical_devices = tf.config.list_logical_devices
_used = 0


def use(count):
    """Makes so many of this process's GPUs the replicas, or stages, of strategies."""
    global _used
    _used = count


def install(most, workers):
    """Splits the CPU: `CPU:0` is the host, the others are GPUs. Before the runtime is started.

    Args:
        most: How many GPUs this process has.
        workers: How many workers of parameter servers, with a GPU each, there are.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(1 + most)]
    tf.config.set_logical_device_configuration(cpu, parts)
    gpus = [
        tf.config.LogicalDevice(f"/job:worker/replica:0/task:{task}/device:GPU:0", "GPU")
        for task in range(workers)
    ]

    def list_logical_devices(device_type=None):
        return gpus if device_type == "GPU" else _list_logical_devices(device_type)

    def local_devices(self, cluster_resolver, worker_device):
        return tuple(_names(worker_device)), "GPU"

    for owner, name, value in (
        (tf.config, "list_logical_devices", list_logical_devices),
        (MultiWorkerMirroredExtended, "_initialize_local_devices", local_devices),
        (MultiWorkerMirroredExtended, "fetches_to_devices", True),
        (Launcher, "_on_cpu", property(lambda launcher: not is_gpu(_spec(launcher._device)))),
        (strategy, "local_devices", lambda: _names(_JOB)),
    ):
        # Unlike an assignment, it minds that there is such a name.
        mock.patch.object(owner, name, value).start()


def is_gpu(spec):
    """Whether a `tf.DeviceSpec` stands for a GPU."""
    return spec.device_type == "GPU" or (spec.device_type == "CPU" and bool(spec.device_index))


def _spec(device):
    return tf.DeviceSpec.from_string(device)


def _names(task):
    return [f"{task}/device:CPU:{i}" for i in range(1, 1 + _used)]
