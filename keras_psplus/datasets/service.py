"""Datasets that read from the tf.data service, and whether several workers may read them so.

The service hands out each element of a job once, to whichever reader asks first. Readers that name
a job share it. A reader that does not has its own job, with all elements in another order.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.cluster.environment import RESTART_VARIABLE
from keras_psplus.datasets.rows_before_maps import (
    constant_value,
    graph_of,
    has_stage,
    reads_service,
    scopes,
)
from keras_psplus.log import warn_once
from keras_psplus.tf_internals import data_service_pb2

_STAGES = ("DataService", "Variant", "FlatMap", "Interleave")
_POLICIES = data_service_pb2.ProcessingModeDef.ShardingPolicy


class Reader(NamedTuple):
    """A dataset's reader of the service; fields known only at run time are None.

    Attributes:
        job_name: Name of the job; empty for an anonymous job.
        sharding: Name of the `tf.data.experimental.service.ShardingPolicy`.
        dataset_id: The service's number of the dataset.
        consumer_index: Index among `num_consumers` that take turns; -1 without turns.
    """

    job_name: str | None
    sharding: str | None
    dataset_id: str | None
    consumer_index: int | None


def readers(dataset: Any) -> list[Reader]:
    """Finds what a dataset reads from the service, also in functions that make datasets."""
    if not isinstance(dataset, tf.data.Dataset) or not has_stage(dataset, _STAGES):
        return []
    try:
        graph = graph_of(dataset)
    except (tf.errors.OpError, ValueError):
        return []
    found = []
    for nodes in scopes(graph):
        by_name = {node.name: node for node in nodes}
        found += [_reader(node, by_name) for node in nodes if reads_service(node)]
    return found


def _reader(node: Any, by_name: dict[str, Any]) -> Reader:
    def value(position: int) -> Any:
        source = by_name.get(node.input[position].split(":")[0])
        return constant_value(source).item() if source and source.op == "Const" else None

    def text(position: int) -> str | None:
        return None if value(position) is None else str(value(position), "utf-8", "replace")

    # Inputs: dataset_id, processing_mode, address, protocol, job_name, consumer_index, ...
    mode = value(1)
    if mode is not None:
        mode = data_service_pb2.ProcessingModeDef.FromString(mode).sharding_policy
        mode = _POLICIES.Name(mode)
    return Reader(text(4), mode, text(0), value(5))


def check_shared(
    readers_by_worker: dict[str, list[Reader]], is_own_share: bool, steps: int | None
) -> None:
    """Checks that workers which read from the service see each row once between them.

    Args:
        is_own_share: Whether the dataset says that each worker's is its own
            (`AutoShardPolicy.OFF`).
        steps: Number of steps of an epoch that the script has set, or None for all of the data.

    Raises:
        ValueError: If rows would come twice or never. It is raised on every worker.
    """
    if not any(readers_by_worker.values()) or len(readers_by_worker) == 1:
        return
    remedy = "Pass `job_name` to `tf.data.experimental.service.distribute`, alike on all workers"
    jobs = {
        worker: sorted({str(reader.job_name) for reader in found})
        for worker, found in readers_by_worker.items()
    }
    received = "; ".join(f"{worker}: job_name={_names(jobs[worker])}" for worker in jobs)
    everything = [reader for found in readers_by_worker.values() for reader in found]
    if any(reader.job_name == "" for reader in everything) and not is_own_share:
        raise ValueError(
            "This dataset reads from the tf.data service without a `job_name`: each worker would "
            "get all rows, in another order, so that a split by rows has some twice and "
            f"others never. {remedy}, with processing_mode='distributed_epoch'. "
            f"Received: {received}"
        )
    if len({tuple(names) for names in jobs.values()}) > 1:
        raise ValueError(
            "The workers read from different jobs of the tf.data service, each of which hands out "
            f"all rows. {remedy}. Received: {received}"
        )
    # Every worker of the service reads the whole dataset then.
    repeated = [reader for reader in everything if reader.sharding == "OFF" and reader.job_name]
    if repeated and not steps:
        raise ValueError(
            "With processing_mode='parallel_epochs' (ShardingPolicy.OFF), every worker of the "
            "tf.data service hands out all rows: an epoch has each row as many times as there are "
            "such workers. Pass processing_mode='distributed_epoch', or repeat the dataset and "
            f"pass `steps_per_epoch`. Received: {received}"
        )
    turns = {
        worker: [reader.consumer_index for reader in found if reader.consumer_index != -1]
        for worker, found in readers_by_worker.items()
    }
    taken = collections.Counter(index for indices in turns.values() for index in set(indices))
    if any(count > 1 for index, count in taken.items() if index is not None):
        received = "; ".join(f"{worker}: consumer_index={turns[worker]}" for worker in turns)
        raise ValueError(
            "Workers that take turns at the tf.data service need a `consumer_index` each: pass the "
            f"task's index. Received: {received}"
        )


def description(found: Sequence[Reader]) -> str:
    """Says for a log line what `Reader`s read."""
    jobs = sorted({str(reader.job_name) for reader in found} - {""})
    own = [reader for reader in found if reader.job_name == ""]
    parts = [f"tf.data service, job {_names(jobs)}"] if jobs else []
    return ", ".join(parts + ["tf.data service, a job for each worker"] * bool(own))


def check_rows_came(dataset: tf.data.Dataset) -> None:
    """Raises for an epoch without batches, if an exhausted job may be the reason.

    Raises:
        ValueError: If the dataset reads from a job of the service that has a name.
    """
    jobs = sorted({reader.job_name for reader in readers(dataset) if reader.job_name})
    if jobs:
        raise ValueError(
            "The epoch had no batch. A job of the tf.data service hands out its rows once, also "
            "if the training is started again: give every start another `job_name`, such as "
            f"f'train-{{os.environ.get(\"{RESTART_VARIABLE}\", 0)}}' under the launcher's "
            f"restarts, or start the dispatcher again. Received: job_name={_names(jobs)}"
        )


def warn_of_restart(found: Sequence[Reader]) -> None:
    """Warns if a job's name does not show that the training has been started again."""
    restart = os.environ.get(RESTART_VARIABLE, "0")
    old = sorted({r.job_name for r in found if r.job_name and restart not in r.job_name})
    if restart != "0" and old:
        warn_once(
            "start number %s reads from the tf.data service's job %s: if an earlier start has read "
            "from it, rows are missing from this epoch. Have %s in the `job_name`",
            restart,
            _names(old),
            RESTART_VARIABLE,
        )


def _names(jobs: Iterable[str]) -> str:
    return ", ".join(repr(job) for job in jobs) or "none"
