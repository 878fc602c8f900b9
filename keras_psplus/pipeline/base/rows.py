"""Number of rows of a batch, found before there is one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import tree


def rows_of_spec(structure: Any) -> int | None:
    """Rows of a batch, by its first part that tells; None if none does.

    Args:
        structure: Structure of things with shapes.
    """
    shapes = [tuple(leaf.shape) for leaf in tree.flatten(structure) if _has_rank(leaf)]
    return next((shape[0] for shape in shapes if shape and shape[0]), None)


def rows_of_data(adapter: Any, dataset: tf.data.Dataset) -> int | None:
    """Rows of a full batch of `fit`'s data; None if it does not tell."""
    size = adapter.batch_size
    while size is None and dataset is not None:
        size = tf.get_static_value(getattr(dataset, "_batch_size", None))
        inputs = dataset._inputs()
        dataset = inputs[0] if len(inputs) == 1 else None
    return None if size is None else int(size)


def _has_rank(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and getattr(leaf.shape, "rank", True) is not None
