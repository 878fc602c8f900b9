"""Data: how each kind of input that Keras takes is shared out between the workers."""

import json
import random
from typing import Any, NamedTuple

import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    py_dataset_adapter,
    tf_dataset_adapter,
)

from keras_psplus.all_reduce import batches
from keras_psplus.hybrid import next_batch
from keras_psplus.keras_hooks.arrays import array_dataset, as_it_is
from keras_psplus.keras_hooks.py_dataset import share_order
from keras_psplus.keras_hooks.unknown_length import UnknownLength
from keras_psplus.log import info_once, logger
from keras_psplus.reseed import reseed

_POLICY = tf.data.experimental.AutoShardPolicy
_UNKNOWN = int(tf.data.experimental.UNKNOWN_CARDINALITY)


class Distributed(NamedTuple):
    """A data adapter's data, shared out.

    Attributes:
        dataset: What the trainer iterates over: elements are `Shards`, or per-replica values.
        adapter: The data adapter, or one that does not know its length.
        batch_spec: Type specification of one global batch.
    """

    dataset: Any
    adapter: Any
    batch_spec: Any


def distribute(strategy, adapter, reads_ahead=False):
    """Shares a data adapter's data out over the replicas of all workers.

    Args:
        strategy: The strategy.
        adapter: Keras's data adapter.
        reads_ahead: Whether each batch comes as a `BatchAndNext`, where it can.

    Returns:
        `Distributed`.
    """
    kind, facts = _describe(adapter)
    control = strategy.extended.control
    # Drawn as Keras draws its seeds, so that `keras.utils.set_random_seed` settles it.
    proposal = dict(facts, seed=random.randint(1, int(1e9)))
    told = [proposal]
    if control:
        told = [json.loads(text) for text in control.exchange("data", json.dumps(proposal))]
    seed = told[0]["seed"]
    alike = all({**other, "seed": 0} == {**told[0], "seed": 0} for other in told)
    if kind == "array" and alike:
        return _with_next(_array(strategy, adapter, seed), reads_ahead)
    if kind == "own" or not alike:
        return _own_share(strategy, adapter, told, alike, reads_ahead)
    share_order(adapter, seed)
    dataset = _without_missing(reseed(adapter.get_tf_dataset(), seed))
    if kind in ("python", "generator"):
        dataset = _copied(dataset)
    if facts["batches"] != _UNKNOWN:
        return _with_next(_lockstep(strategy, adapter, dataset, facts), reads_ahead)
    return _until_all_end(strategy, adapter, dataset, reads_ahead)


def symbolic_batch(spec):
    """A batch's type specification with what Keras's symbolic build asks of a batch."""
    return tf.nest.map_structure(lambda leaf: leaf if hasattr(leaf, "dtype") else None, spec)


def split_eagerly(strategy, batch):
    """Cuts a batch of arrays that every worker has, as `train_on_batch` gets it."""
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    batch = tree.map_structure(
        lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), batch
    )
    return batches.split(batch, strategy.extended.world)


def _describe(adapter):
    """What kind of data this is, and what must be equal on all workers for it to be split."""
    if isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return "array", {
            "rows": int(adapter._num_samples),
            "batch_size": int(adapter._batch_size),
            "shuffle": str(adapter._shuffle),
        }
    if isinstance(adapter, tf_dataset_adapter.TFDatasetAdapter):
        dataset = adapter.get_tf_dataset()
        if isinstance(dataset, tf.distribute.DistributedDataset):
            return "own", {"policy": "distributed by the script"}
        policy = dataset.options().experimental_distribute.auto_shard_policy
        facts = {"batches": int(dataset.cardinality()), "policy": policy.name}
        sharded = policy in (_POLICY.FILE, _POLICY.OFF, _POLICY.HINT)
        return ("own" if sharded else "dataset"), facts
    if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        count = adapter.num_batches
        infinite = int(tf.data.experimental.INFINITE_CARDINALITY)
        return "python", {"batches": infinite if count is None else int(count)}
    return "generator", {"batches": _UNKNOWN}


def _array(strategy, adapter, seed):
    """Arrays: every worker gathers its own rows only, by one order for all."""
    dataset = array_dataset(adapter, strategy.extended.world, seed)
    _say(
        strategy,
        f"{adapter._num_samples} rows in batches of {adapter._batch_size}, each split by rows"
        + (", shuffled alike on all workers" if adapter._shuffle else ""),
    )
    return Distributed(dataset, adapter, _batch_spec_of_shards(dataset))


def _lockstep(strategy, adapter, dataset, facts):
    """As many global batches on every worker: each cuts its rows out, and nobody has to ask."""
    world = strategy.extended.world
    spec = dataset.element_spec
    sharded = _in_order(dataset).map(
        as_it_is(lambda *batch: batches.split(_element(batch, spec), world)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    count = facts["batches"]
    many = f"{count} batches" if count >= 0 else "an unlimited number of batches"
    _say(
        strategy,
        f"{many}, each split by rows; every worker reads the whole dataset (set "
        "AutoShardPolicy.FILE in its options to share out the files)",
    )
    return Distributed(sharded.prefetch(tf.data.AUTOTUNE), adapter, spec)


def _with_next(distributed, reads_ahead):
    if not reads_ahead:
        return distributed
    dataset = next_batch.with_next(distributed.dataset).prefetch(tf.data.AUTOTUNE)
    return distributed._replace(dataset=dataset)


def _until_all_end(strategy, adapter, dataset, reads_ahead):
    """Unknown length: TensorFlow asks at every step whether somebody still has data."""
    world = strategy.extended.world
    spec = dataset.element_spec

    @as_it_is
    def parts(*batch):
        # Their rows are counted later, when all replicas have them.
        shards = batches.split(_element(batch, spec), world, pads=False)
        pieces = [tf.data.Dataset.from_tensors(part.data) for part in shards.replicas]
        whole = pieces[0]
        for piece in pieces[1:]:
            whole = whole.concatenate(piece)
        return whole

    dataset = _in_order(_with_any_batch_size(dataset)).flat_map(parts)
    distributed = _of_replicas(strategy, dataset, reads_ahead)
    _say(
        strategy,
        "batches of unknown number, each split by rows; one small message a step finds "
        "out when all workers have run out",
    )
    return Distributed(distributed, adapter, spec)


def _of_replicas(strategy, dataset, reads_ahead):
    """A distributed dataset of one that has the batches of the local replicas in turn."""
    if reads_ahead:
        dataset = next_batch.with_next(dataset, apart=strategy.extended.world.local_replicas)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return strategy.distribute_datasets_from_function(lambda _: dataset)


def _own_share(strategy, adapter, told, alike, reads_ahead):
    """Every worker trains on data of its own: files by TensorFlow, or as the script read them."""
    dataset = adapter.get_tf_dataset()
    if isinstance(dataset, tf.distribute.DistributedDataset):
        _say(strategy, "distributed by the script")
        if reads_ahead:
            info_once("no rows are read ahead: the data were distributed by the script")
        return Distributed(dataset, adapter, _local_spec(dataset.element_spec))
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if not alike:
        names = strategy.extended.control.names
        facts = "; ".join(
            f"{name}: " + ", ".join(f"{k}={v}" for k, v in f.items() if k != "seed")
            for name, f in zip(names, told)
        )
        logger.warning(
            "the workers' data differ (%s): each trains on its own, with batches of 1/%d of the "
            "batch size. If it should be one dataset, give every worker the same.",
            facts,
            strategy.num_workers,
        )
        policy = _POLICY.OFF
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    spec = dataset.element_spec
    dataset = _with_any_batch_size(dataset).with_options(options)
    _say(
        strategy,
        f"each worker's own share (AutoShardPolicy.{policy.name}); one that has run "
        "out joins with zero weight until all have",
    )
    distributed = strategy.experimental_distribute_dataset(dataset)
    if reads_ahead:
        # This worker's share, in batches of one replica.
        (share,) = distributed._cloned_datasets
        distributed = _of_replicas(strategy, share, reads_ahead)
    return Distributed(distributed, UnknownLength(adapter), spec)


def _element(batch, spec):
    # A namedtuple comes as one argument.
    return batch if type(spec) is tuple else batch[0]


def _in_order(dataset):
    # Parallel stages that hand over what is ready first would do so differently on each worker.
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _without_missing(dataset):
    # Keras makes an empty optional of a generator's None, which TensorFlow cannot distribute.
    spec = dataset.element_spec
    kept = len(spec) if type(spec) is tuple else 0
    while kept > 1 and isinstance(spec[kept - 1], tf.OptionalSpec):
        kept -= 1
    if not kept or kept == len(spec):
        return dataset
    return dataset.map(as_it_is(lambda *batch: batch[:kept]))


def _copied(dataset):
    # Tensors of a Python generator may share memory with the user's arrays, and kernels reuse the
    # buffers of their inputs: a step would write into the user's labels.
    def copy(leaf):
        if isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.string, tf.variant, tf.resource):
            return tf.raw_ops.DeepCopy(x=leaf)
        return leaf

    spec = dataset.element_spec
    return dataset.map(as_it_is(lambda *batch: tf.nest.map_structure(copy, _element(batch, spec))))


def _with_any_batch_size(dataset):
    # A worker that has run out joins with a batch of no rows, which a static shape would forbid.
    def relax(leaf):
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            return tf.raw_ops.PlaceholderWithDefault(
                input=leaf, shape=[None] + leaf.shape.as_list()[1:]
            )
        return leaf

    spec = dataset.element_spec
    return dataset.map(as_it_is(lambda *batch: tf.nest.map_structure(relax, _element(batch, spec))))


def _batch_spec_of_shards(dataset):
    spec = dataset.element_spec.replicas[0].data

    def relax(leaf):
        if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank:
            return tf.TensorSpec([None] + leaf.shape.as_list()[1:], leaf.dtype)
        return leaf

    return tf.nest.map_structure(relax, spec)


def _local_spec(spec):
    def local(leaf):
        return leaf._value_specs[0] if hasattr(leaf, "_value_specs") else leaf

    return tf.nest.map_structure(local, spec)


def _say(strategy, how):
    info_once(
        "data over %d worker(s) x %d replica(s): %s",
        strategy.num_workers,
        strategy.extended.world.local_replicas,
        how,
    )
