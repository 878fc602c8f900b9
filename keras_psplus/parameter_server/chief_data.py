"""Data under `ParameterServerStrategy`: the chief reads them, or workers if the options say so.

`experimental_distribute_dataset` and `distribute_datasets_from_function` of parameter servers give
something that is built on the workers only, so that it has no length and no batches here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core import seeds as data_seeds
from keras_psplus.datasets import seed_shuffles
from keras_psplus.keras_internals.keras_parts import (
    array_data_adapter,
    py_dataset_adapter,
    tf_dataset_adapter,
)
from keras_psplus.log import info_once, logger, warn_once
from keras_psplus.parameter_server.worker_data import WorkerDataset

if TYPE_CHECKING:
    from keras_psplus.parameter_server.context import StepContext


_POLICY = tf.data.experimental.AutoShardPolicy


def on_workers(
    context: StepContext,
    adapter: Any,
    keeps_order: bool,
    of_workers: Sequence[tuple[tf.data.Dataset, int]] | None,
    seed_for: Callable[[int], int],
) -> WorkerDataset | None:
    """Makes a dataset that the workers read; None if the chief reads the data.

    Args:
        keeps_order: Whether results are wanted in the order of the data.
        of_workers: List of pairs of a `tf.data.Dataset` and its seed, one for each worker, if the
            script gave a function that makes them; the adapter has all of them then. Else None.
        seed_for: Function of the seed that new data would get, which returns the one to use.
    """
    if not isinstance(adapter, tf_dataset_adapter.TFDatasetAdapter):
        _say_that_the_chief_reads(context, adapter)
        return None
    dataset = adapter.get_tf_dataset()
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if of_workers is None and policy not in (_POLICY.FILE, _POLICY.DATA):
        info_once(
            "data over %d worker(s): the chief reads them and sends each batch with its step, over "
            "its own network; set AutoShardPolicy.FILE or DATA in the dataset's options to have "
            "the workers read them",
            context.num_workers,
        )
        return None
    if context.mode.is_sync:
        info_once("the chief reads the data, as it decides which worker takes what")
        return None
    if keeps_order:
        info_once("predict: the chief reads the data, so that results keep their order")
        return None
    seed, lost = seed_for(data_seeds.draw()), context.scheduler.queue.lost
    is_cut = of_workers is None
    try:
        workers = WorkerDataset(
            of_workers or [(dataset, seed)] * context.num_workers,
            policy if is_cut else None,
            dataset.element_spec,
            lost,
        )
    except ValueError as error:
        logger.warning(
            "this dataset cannot be sent to the workers (%s), so the chief reads it and sends each "
            "batch with its step, over its own network",
            error,
        )
        return None
    share = f"its own share (AutoShardPolicy.{policy.name})"
    info_once(
        "data over %d worker(s): each reads %s",
        context.num_workers,
        share if is_cut else "what the script's function has made for it",
    )
    return workers


def _say_that_the_chief_reads(context: StepContext, adapter: Any) -> None:
    if isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        info_once(
            "data over %d worker(s): arrays; the chief sends each batch with its step",
            context.num_workers,
        )
        return
    kind = "PyDataset" if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter) else "generator"
    warn_once(
        "a Python %s cannot be sent to the workers: the chief runs it and sends each batch with "
        "its step, so that all workers together are no faster than this process makes batches",
        kind,
    )


def take_apart(
    num_workers: int, arguments: dict[str, Any]
) -> list[tuple[tf.data.Dataset, int]] | None:
    """Puts a `tf.data.Dataset` in the place of a distributed one among arguments.

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
    # Shuffled data that are sharded need one order for all; each who reads everything, its own.
    datasets, draw_again = list[tf.data.Dataset](), data_seeds.remembered()
    for context in contexts:
        if contexts[0].is_asked:
            draw_again()
        datasets.append(_made_for(function, context))
    is_sharded = any(context.is_asked for context in contexts)
    first = data_seeds.draw()
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
