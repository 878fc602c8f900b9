"""Kernels in C++ for what takes TensorFlow's own many passes over memory."""

import functools
import os

import tensorflow as tf

from keras_psplus.log import info_once
from keras_psplus.native.compiler import BuildError, build

_VARIABLE = "KERAS_PSPLUS_NATIVE"


def kernels():
    """Loads the library's own kernels, which are compiled when this machine needs them first.

    They are for processors. `KERAS_PSPLUS_NATIVE=0` in the environment does without them.

    Returns:
        Module with a function for each kernel's operation; None if there are none, which is logged
        with the reason. Then, and on GPUs, TensorFlow's own kernels serve.
    """
    if os.environ.get(_VARIABLE) == "0" or tf.config.list_logical_devices("GPU"):
        return None
    loaded, state = _loaded()
    if loaded is None:
        info_once("compressing by TensorFlow's own kernels, which are slower: %s", state)
    return loaded


def state():
    """Says in a line whether there are kernels, and compiles them if that has not been done."""
    if os.environ.get(_VARIABLE) == "0":
        return f"not used: {_VARIABLE}=0"
    return _loaded()[1]


@functools.cache
def _loaded():
    try:
        path = build()
        return tf.load_op_library(str(path)), f"compiled: {path}"
    except (BuildError, tf.errors.OpError, OSError) as reason:
        return None, f"none: {reason}"
