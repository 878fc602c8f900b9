"""Datasets of arrays in memory, from which each worker gathers its rows.

The order of the rows is the same on all workers.
"""

from typing import Any

import tensorflow as tf

from keras_psplus.core.batch import batches
from keras_psplus.keras_internals.keras_parts import array_slicing, tree

# Nothing here branches on tensors, and AutoGraph takes a third of a second to find that out.
as_it_is = tf.autograph.experimental.do_not_convert


def array_dataset(adapter: Any, world: batches.World, seed: int) -> tf.data.Dataset:
    """A dataset with the `Shards` of one worker for every step of an epoch.

    Args:
        seed: Int, equal on all workers; each epoch draws another order from it.
    """
    rows, batch_size = adapter._num_samples, adapter._batch_size
    shuffle = adapter._shuffle
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    inputs = tree.lists_to_tuples(inputs)
    steps = -(-rows // batch_size)

    def order(epoch_seed: tf.Tensor) -> tf.Tensor:
        if shuffle and shuffle != "batch":
            everything = tf.range(rows, dtype=tf.int64)
            return tf.random.experimental.stateless_shuffle(everything, [epoch_seed, 0])
        return tf.range(rows, dtype=tf.int64)

    @as_it_is
    def steps_of(epoch_seed: tf.Tensor) -> tf.data.Dataset:
        indices = tf.data.Dataset.from_tensors(order(epoch_seed)).repeat(steps)
        return tf.data.Dataset.zip((indices, tf.data.Dataset.range(steps))).map(
            as_it_is(lambda order, number: (order, number, epoch_seed))
        )

    def take(indices: tf.Tensor, inputs: Any) -> Any:
        def take_leaf(leaf: Any) -> Any:
            if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(leaf, indices)
            if isinstance(leaf, (list, tuple, dict)):
                return None
            return tf.gather(leaf, indices, axis=0) if tf.is_tensor(leaf) else leaf

        return tree.traverse(take_leaf, inputs)

    even = rows % batch_size == 0 and batch_size % world.replicas == 0

    @as_it_is
    def shards(order_and_step: tuple[tf.Tensor, ...], inputs: Any) -> batches.Shards:
        order, number, epoch_seed = order_and_step
        start = number * batch_size
        count = tf.cast(tf.minimum(rows - start, batch_size), tf.int32)
        batch = order[start : start + tf.cast(count, tf.int64)]
        if shuffle == "batch":
            batch = tf.random.experimental.stateless_shuffle(batch, [epoch_seed, number + 1])
        parts = []
        for local_replica in range(world.local_replicas):
            first, end = world.bounds(batch_size if even else count, local_replica)
            local_rows = tf.constant(end - first) if even else end - first
            if not even:
                first, end = world.padded_bounds(count, local_replica)
            mine = batch[first:end]
            if even:
                mine.set_shape([end - first])
            parts.append(batches.Batch(take(mine, inputs), local_rows, count))
        return batches.Shards(tuple(parts))

    epochs = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    steps_dataset = epochs.flat_map(steps_of)
    dataset = tf.data.Dataset.zip((steps_dataset, tf.data.Dataset.from_tensors(inputs).repeat()))
    dataset = dataset.map(shards, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    options = tf.data.Options()
    # As in Keras's own adapter: their cost is that of writing the arrays out.
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)
