"""Batches copied to their GPUs while the step before them is taken."""

from __future__ import annotations

import tensorflow as tf

from keras_psplus.all_reduce.data.array_data import as_it_is
from keras_psplus.all_reduce.data.elements import dataset_of
from keras_psplus.core.batch import batches


def on_devices(
    strategy: tf.distribute.Strategy, dataset: tf.data.Dataset
) -> tf.distribute.DistributedDataset:
    """Distributes a dataset of `Shards`: each replica's `Batch` comes on its device.

    Args:
        dataset: `tf.data.Dataset` of `Shards`, of as many elements on all workers.
    """

    @as_it_is
    def parts(shards: batches.Shards) -> tf.data.Dataset:
        return dataset_of(batch.with_text() for batch in shards.replicas)

    # The tuple keeps `flat_map` from taking the shards themselves apart.
    dataset = tf.data.Dataset.zip((dataset,)).flat_map(parts).prefetch(tf.data.AUTOTUNE)
    extended = strategy.extended
    asks = extended.experimental_enable_get_next_as_optional
    # Otherwise workers would ask each other at each step whether there is another batch.
    extended.experimental_enable_get_next_as_optional = False
    try:
        return strategy.distribute_datasets_from_function(lambda _: dataset)
    finally:
        extended.experimental_enable_get_next_as_optional = asks
