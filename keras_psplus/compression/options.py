"""Checks of what a user gives to compressors: seeds, shapes and types."""

import numbers
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.arguments import number


def seed_number(value: Any) -> int:
    """Returns the option `seed` as an int.

    Raises:
        ValueError: If TensorFlow's generators could not take it.
    """

    def holds(seed: Any) -> bool:
        return isinstance(seed, numbers.Integral) and -(2**63) <= int(seed) < 2**63

    return int(number("seed", value, "an int that fits in 64 bits", holds))


def size_of(shape: tf.TensorShape | Sequence[int]) -> int:
    """Counts the elements of a tensor.

    Raises:
        ValueError: If the shape does not say how many there are.
    """
    size: int | None = tf.TensorShape(shape).num_elements()
    if size is None:
        raise ValueError(
            "what is compressed must have a static shape, with all sizes known. "
            f"Received: shape={tf.TensorShape(shape)}"
        )
    return size


def check_floating(tensor: tf.Tensor) -> None:
    """Raises ValueError unless a tensor holds real floating numbers."""
    if not tensor.dtype.is_floating:
        raise ValueError(
            "what is compressed must be of a floating type, such as float32, float16 or bfloat16; "
            f"strategies send other gradients as they are. Received: dtype={tensor.dtype.name}"
        )
