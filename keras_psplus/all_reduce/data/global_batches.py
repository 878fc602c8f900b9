"""Global batches of a dataset, built whole on every worker or from its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.data import elements
from keras_psplus.all_reduce.data.data_facts import POLICY
from keras_psplus.core.batch import batches
from keras_psplus.datasets import rows_before_maps
from keras_psplus.datasets.shuffle_seeds import seed_shuffles


class GlobalBatches(NamedTuple):
    """Global batches, or one worker's rows of them.

    Attributes:
        cut: Function of the parts of an element, and of `pads`, that returns `Shards`.
        spec: Type specification of a global batch.
        how: What is said of them.
    """

    dataset: tf.data.Dataset
    cut: Callable[..., batches.Shards]
    spec: Any
    how: str


def pipeline_of(dataset: Any, world: batches.World) -> rows_before_maps.Pipeline | str:
    """Takes a dataset apart, if each worker can then map its own rows only.

    Args:
        dataset: `tf.data.Dataset`, or None for data of other kinds.

    Returns:
        `Pipeline`, or why each worker has to map all rows; empty if it has no others.
    """
    if dataset is None or world.local_replicas == world.replicas:
        return ""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return rows_before_maps.take_apart(dataset, is_trusted=policy == POLICY.DATA)


def whole(dataset: tf.data.Dataset, world: batches.World, reason: str) -> GlobalBatches:
    """Batches that every worker puts together from all rows, as one process does.

    Args:
        reason: Why, for the log; may be empty.
    """
    spec = dataset.element_spec

    def cut(*batch: Any, pads: bool) -> batches.Shards:
        return batches.split(elements.element(batch, spec), world, pads)

    how = "every worker runs the whole pipeline" + f", as {reason}" * bool(reason)
    how += " (AutoShardPolicy.FILE in the dataset's options shares out its files)"
    return GlobalBatches(dataset, cut, spec, how)


def of_own_rows(
    pipeline: rows_before_maps.Pipeline, world: batches.World, seed: int
) -> GlobalBatches:
    """Batches of which every worker maps its own rows only.

    Args:
        seed: Int, equal on all workers, that unseeded shuffles are given.
    """
    own_rows = batches.OwnRows(world, pipeline.batch_size, pipeline.is_even)
    # Before the rows are chosen the dataset is the same on all workers, and so are its seeds.
    every_row = seed_shuffles(pipeline.elements, seed)
    dataset = pipeline.of_rows(every_row, own_rows.start, own_rows.most)
    return GlobalBatches(dataset, own_rows.split, pipeline.spec, pipeline.summary)
