"""File of named arrays: a ZIP archive with one `.npy` entry for each."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.files.reading import open_file

_ENDING = ".npy"


def write(path: str | os.PathLike[str], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes arrays one after the other, of which memory holds one at a time.

    Args:
        arrays: Pairs of names and arrays.
    """
    with tf.io.gfile.GFile(os.fspath(path), "wb") as file:
        stream: Any = _Stream(file)
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays:
                with archive.open(name + _ENDING, "w", force_zip64=True) as part:
                    np.lib.format.write_array(part, np.asarray(array, order="C"))


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a file of `write`.

    bfloat16 comes back as its bytes, as in all of NumPy's files.
    """
    found = {}
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            with archive.open(name) as part:
                found[name.removesuffix(_ENDING)] = np.lib.format.read_array(part)
    return found


class _Stream:
    """Sequential file without seeking, all that TensorFlow's files support."""

    def __init__(self, file: tf.io.gfile.GFile) -> None:
        self._file, self.flush = file, file.flush

    def write(self, data: bytes) -> int:
        self._file.write(bytes(data))
        return len(data)
