"""Data: how each kind of input that Keras takes is shared out between the workers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus import datasets
from keras_psplus.all_reduce.data import elements, same_data
from keras_psplus.all_reduce.data import elements as lookahead
from keras_psplus.all_reduce.data.elements import (
    GlobalBatches,
    array_dataset,
    as_it_is,
    share_shuffle,
)
from keras_psplus.core import seeds
from keras_psplus.core.batch import batches
from keras_psplus.core.data_position import UnknownLength
from keras_psplus.datasets import Pipeline, seed_shuffles
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.log import info_once, logger


class Distributed(NamedTuple):
    """A data adapter's data, shared out.

    Attributes:
        dataset: What the trainer iterates over: elements are `Shards`, or per-replica values.
        adapter: The data adapter, or one that does not know its length.
        batch_spec: Type specification of one global batch.
        seed: What decides the order of what is shuffled.
    """

    dataset: Any
    adapter: Any
    batch_spec: Any
    seed: int = 0


class _Proposal(NamedTuple):
    """A worker's description of its data, sent to the others as JSON."""

    kind: str
    facts: dict[str, Any]
    readers: list[Any]
    seed: int
    rank: int
    maps: str = ""
    fingerprint: Any = None


class _Given(NamedTuple):
    """Data, with what `distribute` is told of them."""

    strategy: tf.distribute.Strategy
    adapter: Any
    reads_ahead: bool
    steps: int | None
    to_devices: bool


def distribute(
    strategy: tf.distribute.Strategy,
    adapter: Any,
    seed_for: Callable[[int], int],
    reads_ahead: bool = False,
    steps: int | None = None,
    steps_per_execution: int = 1,
) -> Distributed:
    """Shares a data adapter's data out over the replicas of all workers.

    Args:
        seed_for: Function of the seed that new data would get, which returns the one to use; what
            it says on the first worker counts.
        reads_ahead: Whether each batch comes as a `BatchAndNext`, where it can.
        steps: Steps of an epoch that the script has set, or None.
        steps_per_execution: Steps that the iterator is read in at once.

    Raises:
        ValueError: If the workers' data cannot be parts of one training.
    """
    kind, facts, source = same_data.describe(adapter)
    readers = datasets.readers(source)
    world = strategy.extended.world
    pipeline = elements.pipeline_of(source if kind == "dataset" else None, world)
    how_maps_run = pipeline if isinstance(pipeline, str) else pipeline.summary
    seed = seed_for(seeds.draw())
    is_compared = strategy.num_workers > 1 and not readers
    fingerprint = same_data.fingerprint_of(adapter, kind) if is_compared else None
    proposal = _Proposal(kind, facts, readers, seed, world.rank, how_maps_run, fingerprint)
    proposals = _exchange(strategy, proposal)
    # To read several batches at once, TensorFlow has workers ask each other for each of them.
    to_devices = strategy.extended.fetches_to_devices and steps_per_execution == 1
    given = _Given(strategy, adapter, reads_ahead, steps, to_devices)
    distributed = _distribute(given, proposals, proposal, pipeline)
    return distributed._replace(seed=proposals[0].seed)


def _distribute(
    given: _Given, proposals: list[_Proposal], own: _Proposal, pipeline: Pipeline | str
) -> Distributed:
    strategy, adapter, reads_ahead, *_ = given
    kind, facts, readers, _, _, how_maps_run, _ = own
    world, control = strategy.extended.world, strategy.extended.control
    seed = proposals[0].seed
    alike = all((other.kind, other.facts) == (kind, facts) for other in proposals)
    if strategy.num_workers > 1:
        _check_proposals(given, proposals)
        if alike and not readers:
            fingerprints = [one.fingerprint for one in proposals]
            same_data.check(given.adapter, kind, fingerprints, control, seed)
    if kind == "array" and alike:
        return _ahead(given, _array(strategy, adapter, seed))
    if kind == "own" or not alike or any(reader.job_name != "" for reader in readers):
        return _own_share(given, proposals, readers)
    share_shuffle(adapter, seed)
    if not isinstance(pipeline, str):
        # Workers that do differently would give shuffles other seeds.
        if all(other.maps == how_maps_run for other in proposals):
            of_rows = elements.of_own_rows(pipeline, world, seed)
            return _split(given, of_rows, facts)
        pipeline = "the workers' pipelines differ"
    dataset = adapter.get_tf_dataset()
    # A job of the service, which a copy of the dataset would begin again, has one reader here.
    dataset = elements.drop_none(dataset if readers else seed_shuffles(dataset, seed))
    if kind in ("python", "generator"):
        dataset = elements.clone_spec(dataset)
    return _split(given, elements.whole(dataset, world, pipeline), facts)


def of_one_replica(adapter: Any, seed: int) -> Any:
    """A data adapter's batches, whole, for one replica alone.

    They come in the order of `distribute`, unless the script or a service decides it.
    """
    kind, _, source = same_data.describe(adapter)
    if kind == "array":
        shards = array_dataset(adapter, batches.World(0, 1, 1), seed)
        return shards.map(as_it_is(lambda part: part.replicas[0].data))
    has_own_order = kind == "own" or bool(datasets.readers(source))
    if not has_own_order:
        share_shuffle(adapter, seed)
    dataset = adapter.get_tf_dataset()
    if has_own_order or isinstance(dataset, tf.distribute.DistributedDataset):
        return dataset
    return seed_shuffles(dataset, seed)


def _exchange(strategy: tf.distribute.Strategy, proposal: _Proposal) -> list[_Proposal]:
    control = strategy.extended.control
    if not control:
        return [proposal]
    texts = control.exchange("data", json.dumps(proposal))
    proposals = [_Proposal(*json.loads(text)) for text in texts]
    return [p._replace(readers=[datasets.Reader(*r) for r in p.readers]) for p in proposals]


def _check_proposals(given: _Given, proposals: list[_Proposal]) -> None:
    control = given.strategy.extended.control
    kinds = [proposal.kind for proposal in proposals]
    facts = [proposal.facts for proposal in proposals]
    same_data.check_batch_sizes(kinds, facts, control.names, control.task)
    ranks = [proposal.rank for proposal in proposals]
    same_data.check_same_in_rows(ranks, list(zip(kinds, facts)), control.names)
    # Without a policy, the script has distributed the dataset.
    policies = {fact.get("policy", "OFF") for fact in facts}
    readers = {name: p.readers for name, p in zip(control.names, proposals, strict=True)}
    datasets.check_shared(readers, policies == {"OFF"}, given.steps)


def split_eagerly(world: batches.World, batch: Any) -> batches.Shards:
    """Cuts a batch of arrays that every worker has, as `train_on_batch` gets it."""
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    batch = tree.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf),
        batch,
    )
    return batches.split(batch, world)


def _array(strategy: tf.distribute.Strategy, adapter: Any, seed: int) -> Distributed:
    """Arrays: every worker gathers its own rows only, by one order for all."""
    dataset = array_dataset(adapter, strategy.extended.world, seed)
    _log_distribution(
        strategy,
        f"{adapter._num_samples} rows in batches of {adapter._batch_size}, each split by rows"
        + (", shuffled alike on all workers" if adapter._shuffle else ""),
    )
    return Distributed(dataset, adapter, elements.batch_spec_of_shards(dataset))


def _split(given: _Given, of_dataset: GlobalBatches, facts: dict[str, Any]) -> Distributed:
    if facts["batches"] != same_data.UNKNOWN:
        return _ahead(given, _lockstep(given, of_dataset, facts["batches"]))
    return _until_all_end(given, of_dataset)


def _lockstep(given: _Given, of_dataset: GlobalBatches, count: int) -> Distributed:
    """Equal numbers of global batches on every worker, each of which slices its rows.

    Workers exchange no messages about data while training.
    """
    sharded = elements.to_tuple(of_dataset.dataset).map(
        as_it_is(functools.partial(of_dataset.cut, pads=True)), num_parallel_calls=tf.data.AUTOTUNE
    )
    many = f"{count} batches" if count >= 0 else "an unlimited number of batches"
    _log_distribution(given.strategy, f"{many}, each split by rows; {of_dataset.how}")
    return Distributed(sharded.prefetch(tf.data.AUTOTUNE), given.adapter, of_dataset.spec)


def _ahead(given: _Given, distributed: Distributed) -> Distributed:
    """Batches of `Shards`: with the next ones, or on their devices, where that is wanted."""
    dataset = distributed.dataset
    if given.reads_ahead:
        dataset = lookahead.with_next(dataset).prefetch(tf.data.AUTOTUNE)
    elif given.to_devices:
        dataset = lookahead.on_devices(given.strategy, dataset)
    return distributed._replace(dataset=dataset)


def _until_all_end(given: _Given, of_dataset: GlobalBatches) -> Distributed:
    """Unknown length: TensorFlow asks at every step whether somebody still has data."""

    @as_it_is
    def parts(*batch: Any) -> tf.data.Dataset:
        # Their rows are counted later, when all replicas have them.
        shards = of_dataset.cut(*batch, pads=False)
        return elements.dataset_of(part.data for part in shards.replicas)

    dataset = elements.with_any_batch_size(of_dataset.dataset)
    dataset = elements.to_tuple(dataset).flat_map(parts)
    distributed = _of_replicas(given, dataset)
    _log_distribution(
        given.strategy,
        "batches of unknown number, each split by rows; one small message a step finds "
        f"out when all workers have run out; {of_dataset.how}",
    )
    return Distributed(distributed, given.adapter, of_dataset.spec)


def _of_replicas(given: _Given, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """A distributed dataset of one that has the batches of the local replicas in turn."""
    if given.reads_ahead:
        replicas = given.strategy.extended.world.local_replicas
        dataset = lookahead.with_next(dataset, distance=replicas)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return given.strategy.distribute_datasets_from_function(lambda _: dataset)


def _own_share(given: _Given, proposals: list[_Proposal], readers: list[Any]) -> Distributed:
    """Trains each worker on separate data.

    TensorFlow shards files; without that, the data are as the script read them.
    """
    strategy, adapter, reads_ahead, *_ = given
    dataset = adapter.get_tf_dataset()
    if isinstance(dataset, tf.distribute.DistributedDataset):
        _log_distribution(strategy, "distributed by the script")
        if reads_ahead:
            info_once("no rows are read ahead: the data were distributed by the script")
        return Distributed(dataset, adapter, elements.local_spec(dataset.element_spec))
    policy, how = _policy_of_shares(given, dataset, proposals, readers)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    spec = dataset.element_spec
    dataset = elements.with_any_batch_size(dataset).with_options(options)
    _log_distribution(
        strategy,
        f"each worker's own share ({how}); at each step one batch is made of all workers' next "
        "rows; one that has run out joins with zero weight until all have",
    )
    distributed = strategy.experimental_distribute_dataset(dataset)
    if reads_ahead:
        # This worker's share, in batches of one replica.
        (share,) = distributed._cloned_datasets
        distributed = _of_replicas(given, share)
    return Distributed(distributed, UnknownLength(adapter), spec)


def _policy_of_shares(
    given: _Given, dataset: tf.data.Dataset, proposals: list[_Proposal], readers: list[Any]
) -> tuple[Any, str]:
    """TensorFlow's sharding policy for a dataset, and its description for the log."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if readers:
        datasets.warn_of_restart(readers)
        return same_data.POLICY.OFF, datasets.description(readers)
    all_facts, control = [one.facts for one in proposals], given.strategy.extended.control
    # One process has nobody to differ from, and without a cluster no name.
    who_has = same_data.differences(all_facts, control.names) if all_facts[1:] else ""
    if who_has and {facts.get("policy") for facts in all_facts} != {"OFF"}:
        logger.warning(
            "the workers' data differ (%s), so each trains on all of its own. Training stays "
            "synchronised: each step takes the next 1/%d of a batch from every worker's data and "
            "averages the gradients over all of these rows. Rows that several workers have come "
            "once from each. If it should be one dataset, give every worker the same; if each "
            "one's is its own share, set AutoShardPolicy.OFF in the options of a tf.data.Dataset.",
            who_has,
            given.strategy.num_workers,
        )
        return same_data.POLICY.OFF, "the workers' data differ"
    how = f"AutoShardPolicy.{policy.name}"
    return policy, f"{how}; {who_has}" if who_has else how


def _log_distribution(strategy: tf.distribute.Strategy, how: str) -> None:
    if not strategy.is_chief:
        return
    info_once(
        "data over %d worker(s) x %d replica(s): %s",
        strategy.num_workers,
        strategy.extended.world.local_replicas,
        how,
    )
