"""Batches paired with their successors, so that a step can prefetch the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.data.elements import as_it_is, dataset_of
from keras_psplus.core.batch import batches

_as_it_is = tf.autograph.experimental.do_not_convert


class BatchAndNext(NamedTuple):
    """A replica's batch and the one after it.

    Attributes:
        batch: `Batch`, or a structure of tensors.
        following: The data of the batch after it; if there is none, those of `batch`.
        is_there: Scalar bool, whether the batch after it exists and has rows.
    """

    batch: Any
    following: Any
    is_there: Any

    @property
    def data(self) -> Any:
        return data_of(self.batch)


def data_of(batch: Any) -> Any:
    """Tensors of a batch, without its row counts."""
    return batch.data if isinstance(batch, batches.Batch) else batch


def with_next(dataset: tf.data.Dataset, distance: int = 1) -> tf.data.Dataset:
    """Puts a `BatchAndNext` in the place of each batch, or of each batch of `Shards`.

    Args:
        distance: How many elements later a replica's next batch comes.
    """
    # In optionals, elements of any structure and size can be handed on, and be missing. `scan`
    # knows them by the one tensor that each of them is.
    with tf.device("/CPU:0"):
        none = tf.experimental.Optional.empty(dataset.element_spec)

    def closed(optional: tf.experimental.Optional) -> tf.Tensor:
        return tf.nest.flatten(optional, expand_composites=True)[0]

    def opened(tensor: tf.Tensor) -> tf.experimental.Optional:
        return tf.nest.pack_sequence_as(none, [tensor], expand_composites=True)

    @_as_it_is
    def element(batch: Any) -> tf.Tensor:
        return closed(tf.experimental.Optional.from_value(batch))

    @_as_it_is
    def shifted(before: tuple[tf.Tensor, ...], this: tf.Tensor) -> tuple[Any, Any]:
        return (*before[1:], this), (before[0], this)

    @_as_it_is
    def joined(this: tf.Tensor, after: tf.Tensor) -> Any:
        return _joined(opened(this), opened(after))

    # The tuple keeps `map` from taking the batch itself apart.
    elements = tf.data.Dataset.zip((dataset,)).map(element)
    elements = elements.concatenate(tf.data.Dataset.from_tensors(closed(none)).repeat(distance))
    # The first ones have no batch, only one that comes after.
    pairs = elements.scan((closed(none),) * distance, shifted).skip(distance)
    return pairs.map(joined)


def _joined(this: tf.experimental.Optional, after: tf.experimental.Optional) -> Any:
    is_there = after.has_value()
    following = tf.cond(is_there, lambda: after, lambda: this).get_value()
    this = this.get_value()
    if not isinstance(this, batches.Shards):
        return BatchAndNext(this, following, is_there)
    return batches.Shards(
        tuple(
            # A row that does not count is not read.
            BatchAndNext(batch, after.data, tf.logical_and(is_there, after.local_rows > 0))
            for batch, after in zip(this.replicas, following.replicas)
        )
    )


# Batches copied to their GPUs while the step before them is taken.


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
