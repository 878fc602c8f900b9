"""Elements of datasets: forms that TensorFlow can distribute, and their specifications."""

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.all_reduce.data.array_data import as_it_is


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
    """A dataset of some elements."""
    each = [tf.data.Dataset.from_tensors(part) for part in parts]
    return functools.reduce(lambda whole, piece: whole.concatenate(piece), each)


def local_spec(spec: Any) -> Any:
    """The specification of one replica's part of distributed values."""

    def local(leaf: Any) -> Any:
        return leaf._value_specs[0] if hasattr(leaf, "_value_specs") else leaf

    return tf.nest.map_structure(local, spec)
