"""Elements of datasets: rows of one replica, windows, and reading ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import datasets
from keras_psplus.all_reduce.data.same_data import POLICY
from keras_psplus.core.batch import batches
from keras_psplus.datasets import seed_shuffles
from keras_psplus.keras_internals.keras_parts import array_slicing, py_dataset_adapter, tree

# Elements of datasets: forms that TensorFlow can distribute, and their specifications.

# Datasets of arrays in memory, from which each worker gathers its rows.
#
# The order of the rows is the same on all workers.


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


# One order of a shuffled `keras.utils.PyDataset` for all workers.


class SharedShuffle(py_dataset_adapter.PyDataset):
    """A `PyDataset` whose batches are shuffled again each epoch, by a shared seed."""

    def __init__(self, py_dataset: keras.utils.PyDataset, seed: int) -> None:
        super().__init__(
            workers=py_dataset.workers,
            use_multiprocessing=py_dataset.use_multiprocessing,
            max_queue_size=py_dataset.max_queue_size,
        )
        self._py_dataset = py_dataset
        self._random = np.random.default_rng(seed)
        self._order: np.ndarray[Any, Any]
        self._draw()

    def _draw(self) -> None:
        self._order = self._random.permutation(self._py_dataset.num_batches)

    @property
    def num_batches(self) -> int:
        return self._py_dataset.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._py_dataset[int(self._order[index])]

    def on_epoch_begin(self) -> None:
        self._py_dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._py_dataset.on_epoch_end()
        self._draw()


def share_shuffle(adapter: Any, seed: int) -> None:
    """Makes a shuffling `PyDatasetAdapter` shuffle by the seed; leaves all else as it is."""
    if not isinstance(adapter, py_dataset_adapter.PyDatasetAdapter) or not adapter.shuffle:
        return
    if adapter.py_dataset.num_batches is None:
        return
    adapter.py_dataset = SharedShuffle(adapter.py_dataset, seed)
    adapter.shuffle = False
    if adapter.enqueuer is not None:
        adapter.enqueuer.py_dataset = adapter.py_dataset
        adapter.enqueuer.shuffle = False


def element(batch: tuple[Any, ...], spec: Any) -> Any:
    """The element that a function of `Dataset.map` got, as `spec` describes it."""
    # A namedtuple comes as one argument.
    return batch if type(spec) is tuple else batch[0]


def to_tuple(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset with its elements in one order on all workers."""
    # Parallel stages that hand over what is ready first would do so differently on each worker.
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def drop_none(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset without the last parts of its elements that are optionals without a value."""
    # Keras makes an empty optional of a generator's None, which TensorFlow cannot distribute.
    spec = dataset.element_spec
    kept = len(spec) if type(spec) is tuple else 0
    while kept > 1 and isinstance(spec[kept - 1], tf.OptionalSpec):
        kept -= 1
    if not kept or kept == len(spec):
        return dataset
    return dataset.map(as_it_is(lambda *batch: batch[:kept]))


def clone_spec(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset with tensors that share no memory with others."""

    # Tensors of a Python generator may share memory with the user's arrays, and kernels reuse the
    # buffers of their inputs: a step would write into the user's labels.
    def copy(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.string, tf.variant, tf.resource):
            return tf.raw_ops.DeepCopy(x=leaf)
        return leaf

    spec = dataset.element_spec
    return dataset.map(as_it_is(lambda *batch: tf.nest.map_structure(copy, element(batch, spec))))


def with_any_batch_size(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset with a specification that leaves the number of rows open."""

    # A worker that has run out joins with a batch of no rows, which a static shape would forbid.
    def relax(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            return tf.raw_ops.PlaceholderWithDefault(
                input=leaf, shape=[None] + leaf.shape.as_list()[1:]
            )
        return leaf

    spec = dataset.element_spec
    return dataset.map(as_it_is(lambda *batch: tf.nest.map_structure(relax, element(batch, spec))))


def batch_spec_of_shards(dataset: tf.data.Dataset) -> Any:
    """The specification of a global batch, of a dataset of `Shards`."""
    spec = dataset.element_spec.replicas[0].data

    def relax(leaf: Any) -> Any:
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            return tf.TensorSpec([None] + leaf.shape.as_list()[1:], leaf.dtype)
        return leaf

    return tf.nest.map_structure(relax, spec)


def dataset_of(parts: Iterable[Any]) -> tf.data.Dataset:
    each = [tf.data.Dataset.from_tensors(part) for part in parts]
    return functools.reduce(lambda whole, piece: whole.concatenate(piece), each)


def local_spec(spec: Any) -> Any:
    """The specification of one replica's part of distributed values."""

    def local(leaf: Any) -> Any:
        return leaf._value_specs[0] if hasattr(leaf, "_value_specs") else leaf

    return tf.nest.map_structure(local, spec)


# Global batches of a dataset, built whole on every worker or from its rows.


class GlobalBatches(NamedTuple):
    """Global batches, or one worker's rows of them.

    Attributes:
        cut: Function of the parts of an element, and of `pads`, that returns `Shards`.
    """

    dataset: tf.data.Dataset
    cut: Callable[..., batches.Shards]
    spec: Any
    how: str


def pipeline_of(dataset: Any, world: batches.World) -> datasets.Pipeline | str:
    """Takes a dataset apart, if each worker can then map its own rows only.

    Returns:
        `Pipeline`, or why each worker has to map all rows; empty if it has no others.
    """
    if dataset is None or world.local_replicas == world.replicas:
        return ""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return datasets.take_apart(dataset, is_trusted=policy == POLICY.DATA)


def whole(dataset: tf.data.Dataset, world: batches.World, reason: str) -> GlobalBatches:
    """Batches that every worker puts together from all rows, as one process does."""
    spec = dataset.element_spec

    def cut(*batch: Any, pads: bool) -> batches.Shards:
        return batches.split(element(batch, spec), world, pads)

    how = "every worker runs the whole pipeline" + f", as {reason}" * bool(reason)
    how += " (AutoShardPolicy.FILE in the dataset's options shares out its files)"
    return GlobalBatches(dataset, cut, spec, how)


def of_own_rows(pipeline: datasets.Pipeline, world: batches.World, seed: int) -> GlobalBatches:
    """Batches of which every worker maps its own rows only."""
    own_rows = batches.OwnRows(world, pipeline.batch_size, pipeline.is_even)
    # Before the rows are chosen the dataset is the same on all workers, and so are its seeds.
    every_row = seed_shuffles(pipeline.elements, seed)
    dataset = pipeline.of_rows(every_row, own_rows.start, own_rows.most)
    return GlobalBatches(dataset, own_rows.split, pipeline.spec, pipeline.summary)


# Batches paired with their successors, so that a step can prefetch the next.


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

    @as_it_is
    def element(batch: Any) -> tf.Tensor:
        return closed(tf.experimental.Optional.from_value(batch))

    @as_it_is
    def shifted(before: tuple[tf.Tensor, ...], this: tf.Tensor) -> tuple[Any, Any]:
        return (*before[1:], this), (before[0], this)

    @as_it_is
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
    """Distributes a dataset of `Shards`: each replica's `Batch` comes on its device."""

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
