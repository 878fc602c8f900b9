"""Data under `ParameterServerStrategy`: the chief reads them, or workers if the options say so."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import (
    array_data_adapter,
    py_dataset_adapter,
    tf_dataset_adapter,
)
from keras_psplus.log import info_once, logger, warn_once
from keras_psplus.parameter_server.data.worker_data import WorkerDataset

if TYPE_CHECKING:
    from keras_psplus.parameter_server.context import StepContext

_POLICY = tf.data.experimental.AutoShardPolicy


def on_workers(
    context: StepContext,
    adapter: Any,
    in_order: bool,
    of_workers: Sequence[tuple[tf.data.Dataset, int]] | None,
    seed_for: Callable[[int], int],
) -> WorkerDataset | None:
    """Makes a dataset that the workers read; None if the chief reads the data.

    Args:
        context: The strategy's `StepContext`.
        adapter: Keras's data adapter.
        in_order: Whether results are wanted in the order of the data.
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
    if in_order:
        info_once("predict: the chief reads the data, so that results keep their order")
        return None
    # As Keras draws its seeds, so that `keras.utils.set_random_seed` settles it.
    seed, lost = seed_for(random.randint(1, int(1e9))), context.scheduler.queue.lost
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
