"""Facts about a worker's data, and differences between the workers' facts."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.keras_internals.keras_parts import (
    array_data_adapter,
    py_dataset_adapter,
    tf_dataset_adapter,
)

if TYPE_CHECKING:
    from keras_psplus.cluster.config import TaskConfig

POLICY = tf.data.experimental.AutoShardPolicy
UNKNOWN = int(tf.data.experimental.UNKNOWN_CARDINALITY)
_INFINITE = int(tf.data.experimental.INFINITE_CARDINALITY)
_NAMES_SHOWN = 4


class Data(NamedTuple):
    """The data of one worker.

    Attributes:
        kind: `"array"`, `"dataset"`, `"python"` or `"generator"`; `"own"` for a dataset that the
            script, or TensorFlow by files, has shared out.
        facts: Dict of what is known of it, in JSON. One dataset has the same on all workers.
        dataset: The `tf.data.Dataset` it was made from, or None.
    """

    kind: str
    facts: dict[str, Any]
    dataset: Any = None


def describe(adapter: Any) -> Data:
    """Returns the `Data` of one of Keras's data adapters."""
    if isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return Data(
            "array",
            {
                "data": "arrays",
                "rows": int(adapter._num_samples),
                "batch_size": int(adapter._batch_size),
                "shuffle": str(adapter._shuffle),
            },
        )
    if isinstance(adapter, tf_dataset_adapter.TFDatasetAdapter):
        return _describe_dataset(adapter.get_tf_dataset())
    if isinstance(adapter, py_dataset_adapter.PyDatasetAdapter):
        count = adapter.num_batches
        facts = {"data": "PyDataset", "batches": _INFINITE if count is None else int(count)}
        # Keras does not ask for it, but many have it.
        size = getattr(adapter.py_dataset, "batch_size", None)
        if isinstance(size, numbers.Integral):
            facts["batch_size"] = int(size)
        return Data("python", facts)
    return Data("generator", {"data": "generator", "batches": UNKNOWN})


def _describe_dataset(dataset: tf.data.Dataset | tf.distribute.DistributedDataset) -> Data:
    if isinstance(dataset, tf.distribute.DistributedDataset):
        facts: dict[str, Any] = {"data": "distributed by the script"}
        original = getattr(dataset, "_original_dataset", None)
        if original is not None:
            facts["policy"] = original.options().experimental_distribute.auto_shard_policy.name
        return Data("own", facts, original)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    facts = {
        "data": "tf.data.Dataset",
        "batches": int(dataset.cardinality()),
        "policy": policy.name,
    }
    if policy in (POLICY.FILE, POLICY.OFF, POLICY.HINT):
        return Data("own", facts, dataset)
    size = _batch_size(dataset)
    return Data("dataset", facts if size is None else {**facts, "batch_size": size}, dataset)


def _batch_size(dataset: tf.data.Dataset) -> int | None:
    """Rows per batch of the last batching stage; None if there is no such stage."""
    while getattr(dataset, "_batch_size", None) is None:
        below = dataset._inputs()
        if len(below) != 1:
            return None
        (dataset,) = below
    size = tf.get_static_value(dataset._batch_size)
    return None if size is None else int(size)


def differences(all_facts: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Describes differences between the workers' data.

    Returns:
        Text such as `"worker-0: rows=40; worker-1, worker-2: rows=75"`, empty if nothing does.
    """
    keys = list(dict.fromkeys(key for facts in all_facts for key in facts))
    differing = [key for key in keys if any(f.get(key) != all_facts[0].get(key) for f in all_facts)]
    who_has: dict[str, list[str]] = {}
    for name, facts in zip(names, all_facts, strict=True):
        part = ", ".join(f"{key}={facts[key]}" for key in differing if key in facts)
        who_has.setdefault(part, []).append(name)
    return "; ".join(
        f"{text_table.listed(having, _NAMES_SHOWN)}: {part}"
        for part, having in who_has.items()
        if part
    )


def check_batch_sizes(
    kinds: Sequence[str],
    all_facts: Sequence[dict[str, Any]],
    names: Sequence[str],
    task: TaskConfig,
) -> None:
    """Checks that data which the workers split by rows have one batch size.

    Args:
        kinds: List of the workers' kinds of data.

    Raises:
        ValueError: If batch sizes differ. It is raised on every worker.
    """
    sizes = [facts.get("batch_size") for facts in all_facts]
    if "own" in kinds or None in sizes or len(set(sizes)) == 1:
        return
    who_has = differences([{"batch_size": size} for size in sizes], names)
    datasets = "dataset" in kinds
    raise ValueError(
        f"The workers' batch sizes differ ({who_has}). The batch size is that of the global batch, "
        "of which each worker takes its rows: give every worker the same batch size"
        + (", or AutoShardPolicy.OFF if each one's dataset is its own share" if datasets else "")
        + f". Received: batch_size={sizes[names.index(task.name)]} on {task.name} ({task.address})"
    )


def check_same_in_rows(
    ranks: Sequence[int], data: Sequence[tuple[str, dict[str, Any]]], names: Sequence[str]
) -> None:
    """Checks that workers which take the same rows of a batch have the same data.

    Args:
        ranks: Ranks of the workers among those that divide batches.
        data: List of the workers' kinds of data and dicts of facts.

    Raises:
        ValueError: If the data of two such workers differ. It is raised on every worker.
    """
    for worker, rank in enumerate(ranks):
        first = ranks.index(rank)
        if data[worker] != data[first]:
            raise ValueError(
                f"{names[first]} and {names[worker]} train one copy of the model, and must have "
                "the same data: give every worker the whole dataset, from which each takes its "
                f"rows. Received: {data[first]} and {data[worker]}"
            )
