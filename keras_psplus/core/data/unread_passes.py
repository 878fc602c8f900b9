"""Opens iterators of earlier epochs without reading them.

`shuffle`, and whatever else draws a new order for each epoch, draws it when the iterator is opened.
Later epochs then have the order of an uninterrupted run. TensorFlow opens all of them within one
iterator: each iterator made in Python takes 10 ms.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus.core.data import iterator_release


def begin(data: Any, count: int) -> None:
    """Begins a number of passes over data, and reads nothing in them.

    Args:
        data: `tf.data.Dataset`, `tf.distribute.DistributedDataset`, or `iterator_release.Dataset`;
            of anything else, iterators are made.
        count: How many.

    Example:

    ```python
    dataset = tf.data.Dataset.range(10).shuffle(10, seed=1)
    unread_passes.begin(dataset, 2)
    third = list(dataset)  # as in the third pass over it
    ```
    """
    if isinstance(data, iterator_release.Dataset):
        data = data.of
    # In a process of its own, a worker has one.
    shares = getattr(data, "_cloned_datasets", None) or getattr(data, "_datasets", None) or [data]
    if len(shares) > 1 or not isinstance(shares[0], tf.data.Dataset):
        for _ in range(count):
            iter(data)
        return
    # Its input is begun, too, and asked for nothing.
    unread = tf.data.Dataset.choose_from_datasets(shares, tf.data.Dataset.range(0))
    passes = tf.data.Dataset.range(count).flat_map(lambda _: unread)
    options = tf.data.Options()
    # Each would write out the data's graph, and the arrays in it.
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    for _ in passes.with_options(options):
        pass
