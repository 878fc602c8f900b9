"""Devices for which there are kernels: TensorFlow's own for GPUs, the library's for processors."""

import tensorflow as tf


def has_gpus() -> bool:
    """Whether there are GPUs, for which some things are computed by other operations.

    On a GPU, TensorFlow keeps int32 tensors in the host's memory for many operations, such as
    reshaping and arithmetic, and some operations have no kernel at all.
    """
    return bool(tf.config.list_logical_devices("GPU"))
