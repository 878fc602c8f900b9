"""Datasets that a script has distributed itself, under `ParameterServerStrategy`.

`experimental_distribute_dataset` and `distribute_datasets_from_function` of parameter servers give
something that is built on the workers only, so that it has no length and no batches here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.datasets.shuffle_seeds import seed_shuffles
from keras_psplus.keras_internals.keras_parts import tf_dataset_adapter


def take_apart(
    num_workers: int, arguments: dict[str, Any]
) -> list[tuple[tf.data.Dataset, int]] | None:
    """Puts a `tf.data.Dataset` in the place of one that was distributed.

    Args:
        num_workers: Number of workers.
        arguments: Keyword arguments of Keras's `EpochIterator`; `x` is changed.

    Returns:
        List of pairs of a `tf.data.Dataset` and a seed of its unseeded shuffles, one for each
        worker, if a function has made them, else None.

    Raises:
        ValueError: If the function returns something else, or it was distributed by other means.
    """
    x = arguments.get("x")
    if not isinstance(x, tf.distribute.DistributedDataset):
        return None
    if getattr(x, "_original_dataset", None) is not None:
        arguments["x"] = x._original_dataset
        return None
    function = getattr(x, "_dataset_fn", None)
    if function is None:
        raise ValueError(
            "ParameterServerStrategy takes what its own `experimental_distribute_dataset` or "
            "`distribute_datasets_from_function` has returned, or the tf.data.Dataset itself. "
            f"Received: {x}"
        )
    contexts = [_Context(num_workers, i, 1) for i in range(num_workers)]
    datasets = [_made_for(function, context) for context in contexts]
    # Who shards what it has shuffled needs one order for all; who reads everything, its own.
    is_sharded = any(context.is_asked for context in contexts)
    first = random.randint(1, int(1e9))
    seeds = [first if is_sharded else first + i for i in range(len(datasets))]
    # A reader of all of them has a batch of each in turn, until all have ended.
    arguments["x"] = tf.data.Dataset.choose_from_datasets(
        [seed_shuffles(dataset, seed) for dataset, seed in zip(datasets, seeds)],
        tf.data.Dataset.range(len(datasets)).repeat(),
        stop_on_empty_dataset=False,
    )
    class_weight = arguments.get("class_weight")
    adapters = [tf_dataset_adapter.TFDatasetAdapter(dataset, class_weight) for dataset in datasets]
    return [(adapter.get_tf_dataset(), seed) for adapter, seed in zip(adapters, seeds)]


class _Context(tf.distribute.InputContext):
    """Notes whether the function asks which worker its data are for."""

    is_asked = False

    @property
    def input_pipeline_id(self) -> int:
        self.is_asked = True
        return super().input_pipeline_id


def _made_for(function: Callable[..., Any], context: tf.distribute.InputContext) -> tf.data.Dataset:
    dataset = function(context)
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "The function given to `distribute_datasets_from_function` must return a "
            f"tf.data.Dataset. Received: {dataset}"
        )
    return dataset
