"""Kernels in C++ for what takes TensorFlow's own many passes over memory."""

import functools
import os
import threading
from types import ModuleType

import tensorflow as tf

from keras_psplus.log import info_once
from keras_psplus.native.compiler import BuildError, build, is_built, opened
from keras_psplus.native.devices import has_gpus

_VARIABLE = "KERAS_PSPLUS_NATIVE"
_loading = threading.Lock()


def kernels() -> ModuleType | None:
    """Loads the library's own kernels, which are compiled when this machine needs them first.

    They are for processors. `KERAS_PSPLUS_NATIVE=0` in the environment does without them.

    Returns:
        Module with a function for each kernel's operation; None if there are none, and TensorFlow's
        own kernels serve. It is logged if they could not be made.
    """
    if _unwanted():
        return None
    loaded, state = _loaded()
    if loaded is None:
        info_once("compressing by TensorFlow's own kernels, which are slower: %s", state)
    return loaded


def state(compiles: bool = True) -> str:
    """Describes in a line whether there are kernels.

    Args:
        compiles: Whether they are compiled if that has not been done.
    """
    reason = _unwanted()
    if reason:
        return f"not used: {reason}"
    if not compiles and not is_built():
        return "not compiled yet: the first step that needs them does it, in some ten seconds"
    return _loaded()[1]


def _unwanted() -> str | None:
    """Reason why kernels are not used at all, or None."""
    if os.environ.get(_VARIABLE) == "0":
        return f"{_VARIABLE}=0"
    return "there are GPUs" if has_gpus() else None


def _loaded() -> tuple[ModuleType | None, str]:
    # Of threads that ask at the same time, the second would get a module without its functions.
    with _loading:
        return _load()


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        path = build()
        # It stays open: TensorFlow would take another file under the same name for this one.
        return tf.load_op_library(f"/proc/self/fd/{opened(path)}"), f"compiled: {path}"
    except (BuildError, tf.errors.OpError, OSError) as reason:
        return None, f"none: {reason}"
