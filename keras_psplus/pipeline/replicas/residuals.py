"""State of the compressors of gradients between pipelines."""

from __future__ import annotations

import functools
import os
import weakref
import zipfile
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.files.reading import open_file
from keras_psplus.pipeline.replicas.copies import Copied
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import nest


class Residuals:
    """States of compressors: TensorFlow variables on the devices that send.

    Args:
        strategy: `PipelineStrategy`.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = weakref.ref(strategy)
        # By name: the variable, a function that makes its first value, and the weight that it is
        # for.
        self._states: dict[str, tuple[tf.Variable, Any, Any]] = {}
        # By path: the weights that have it, which may be of several models.
        self._paths: dict[str, list[Any]] = {}
        self._to_restore: dict[str, np.ndarray] = {}

    def of(self, copied: Copied, pipeline: int, device: str, first: Any) -> Any:
        """State for a pipeline's gradient of a weight, created if there is none.

        Args:
            copied: The weight.
            pipeline: Number of the pipeline.
            device: Name of the device that sends.
            first: Function without arguments that makes the first state.

        Returns:
            Structure of TensorFlow variables.
        """
        prefix = f"{self._name(copied)}/{pipeline}"
        with tf.Graph().as_default():
            forms = first()
        leaves = []
        for i, (path, _) in enumerate(nest.flatten_with_joined_string_paths(forms)):
            begin = functools.partial(_leaf, first, i, device)
            leaves.append(self._variable(f"{prefix}/{path}", begin, copied.variable, device))
        return tf.nest.pack_sequence_as(forms, leaves)

    def _name(self, copied):
        path = copied.variable().path
        known = self._paths.setdefault(path, [])
        known[:] = [one for one in known if one() is not None]
        if all(one() is not copied.variable() for one in known):
            known.append(copied.variable)
        number = next(i for i, one in enumerate(known) if one() is copied.variable())
        return f"{path}#{number}" if number else path

    def _variable(self, name, begin, weight, device):
        known = self._states.get(name)
        if known is not None and known[2] is weight:
            return known[0]
        with ops.init_scope(), self._strategy().extended.making_on(device), tf.device(device):
            state = tf.Variable(begin(), trainable=False, name="residual")
            self._restore(state, self._to_restore.pop(name, None))
        self._states[name] = state, begin, weight
        return state

    @property
    def has_any(self) -> bool:
        """Whether anything is kept."""
        return bool(self._alive())

    def _alive(self):
        self._states = {n: found for n, found in self._states.items() if found[2]() is not None}
        return self._states

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes all states to a file, one after the other to bound the chief's memory."""
        with tf.io.gfile.GFile(path, "wb") as file:
            stream: Any = _Stream(file)
            with zipfile.ZipFile(stream, "w") as archive:
                self._write(archive)

    def _write(self, archive):
        for name, (state, _, _) in self._alive().items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, np.ascontiguousarray(state.numpy()))

    def read(self, path: str | os.PathLike[str]) -> None:
        """Reads a file of `write`; states created later receive their values then."""
        found = {}
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                with archive.open(name) as part:
                    found[name.removesuffix(".npy")] = np.lib.format.read_array(part)
        for name, (state, begin, _) in self._alive().items():
            state.assign(begin())
            self._restore(state, found.pop(name, None))
        self._to_restore = found

    def _restore(self, state, value):
        if value is not None and state.shape == value.shape:
            state.assign(value)


class _Stream:
    """Sequential file without seeking, all that TensorFlow's files support."""

    def __init__(self, file):
        self._file, self.flush = file, file.flush

    def write(self, data):
        self._file.write(bytes(data))
        return len(data)


def _leaf(first, index, device):
    with tf.device(device):
        return tf.nest.flatten(first())[index]
