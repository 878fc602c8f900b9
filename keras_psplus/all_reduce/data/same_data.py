"""Comparison of the workers' data, of which each must have all rows.

Lengths and batch sizes say little: parts such as `x[rank::2]` are equally long on all workers. So
workers compare some values of arrays and of first batches, and TensorFlow's hash of a dataset's
graph with the constants in it. Floats are compared with a tolerance, as workers may have computed
them. A `PyDataset`, and a dataset that calls Python or draws from generators, is not compared: one
more call may change what the next one returns. Generators that differ, as random ones may, are told
of by a warning.
"""

from __future__ import annotations

import json
import numbers
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.core import seeds
from keras_psplus.datasets import seed_shuffles
from keras_psplus.keras_internals.keras_parts import (
    array_data_adapter,
    py_dataset_adapter,
    tf_dataset_adapter,
    tree,
)
from keras_psplus.log import logger

if TYPE_CHECKING:
    from keras_psplus.cluster.config import TaskConfig
    from keras_psplus.core.jobs.control import ControlPlane


# Facts about a worker's data, and differences between the workers' facts.

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


# Values of each array: of so many rows, so many each.
_ROWS, _VALUES = 8, 8
_TOLERANCE = 1e-3
# Tensors in a dataset's graph, which the hash would copy.
_MOST_BYTES = 64 << 20
_compared: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()


def fingerprint_of(adapter: Any, kind: str) -> Any:
    """Returns a fingerprint of this worker's data, as a value for JSON, or None."""
    if kind == "array":
        return _samples(adapter._inputs)
    if kind == "generator" and hasattr(adapter, "_first_batches"):
        return _samples(adapter._first_batches[0])
    if kind == "dataset" and adapter.get_tf_dataset() not in _compared:
        return _hash(adapter.get_tf_dataset())
    return None


def check(
    adapter: Any, kind: str, fingerprints: Sequence[Any], control: ControlPlane, seed: int
) -> None:
    """Checks that workers whose data are alike in size have the same.

    Raises:
        ValueError: If the data differ. It is raised on every worker.
    """
    if None in fingerprints:
        return
    if kind == "dataset":
        dataset = adapter.get_tf_dataset()
        _compared.add(dataset)
        if any(one["is_final"] for one in fingerprints):
            return
        graphs = {one["graph"] for one in fingerprints}
        if len(graphs) == 1 and "" not in graphs:
            return
        # Of other paths or functions, the same rows may come.
        with seeds.untouched():
            batch = next(iter(seed_shuffles(dataset, seed, apart=True).take(1)), None)
        texts = control.exchange("rows", json.dumps(_samples(batch)))
        fingerprints = [json.loads(text) for text in texts]
    for name, theirs in zip(control.names, fingerprints):
        difference = _difference(fingerprints[0], theirs)
        if not difference:
            continue
        message = (
            f"The data of {control.names[0]} and {name} differ. Every worker must have all "
            "rows, in the same order: it trains its part of each batch. Give every worker the "
            "same data; make the strategy, or call `keras.utils.set_random_seed`, before "
            "anything is shuffled or drawn. If each worker brings rows of its own, set "
            "`experimental_distribute.auto_shard_policy` to "
            "`tf.data.experimental.AutoShardPolicy.OFF` in the options of a "
            f"`tf.data.Dataset`. Received: {difference}"
        )
        if kind != "generator":
            raise ValueError(message)
        logger.warning("%s", message)
        return


def _difference(ours: Any, theirs: Any) -> str:
    """The first difference between two workers' samples, in words; empty if there is none."""
    if len(ours) != len(theirs):
        return f"{len(ours)} arrays and {len(theirs)}"
    for number, (one, other) in enumerate(zip(ours, theirs)):
        if one["shape"] != other["shape"]:
            return f"array {number} with rows of shape {one['shape']} and {other['shape']}"
        for row, a, b in zip(one["rows"], one["values"], other["values"]):
            for left, right in zip(a, b):
                if not _are_close(left, right):
                    return f"{left!r} and {right!r} in row {row} of array {number}"
    return ""


def _are_close(left: Any, right: Any) -> bool:
    if isinstance(left, str) or isinstance(right, str):
        return bool(left == right)
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return bool(np.isclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE**2, equal_nan=True))


def _samples(data: Any) -> list[dict[str, Any]]:
    """Some rows of each array of a structure, and some values of each row."""
    # Not of ragged and sparse rows.
    leaves = [getattr(leaf, "iloc", leaf) for leaf in tree.flatten(data)]
    arrays = [one for one in leaves if isinstance(one, (np.ndarray, tf.Tensor)) or _is_frame(one)]
    return [_sample(one) for one in arrays if _is_frame(one) or len(one.shape)]


def _is_frame(leaf: Any) -> bool:
    """Whether an object indexes the rows of a frame or a series of pandas."""
    return hasattr(leaf, "obj") and type(leaf).__module__.startswith("pandas.")


def _sample(array: Any) -> dict[str, Any]:
    shape = array.obj.shape if _is_frame(array) else array.shape
    rows = _spread(int(shape[0] or 0), _ROWS)
    values = []
    for row in rows:
        part = array[row]
        flat = np.reshape(part.numpy() if tf.is_tensor(part) else part, -1)
        values.append([_plain(flat[i]) for i in _spread(len(flat), _VALUES)])
    return {"shape": [int(n or 0) for n in shape[1:]], "rows": rows, "values": values}


def _spread(count: int, most: int) -> list[int]:
    """Numbers below a count, evenly spread, the first and the last among them."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most))})


def _plain(value: Any) -> Any:
    """A value for JSON."""
    if isinstance(value, (bytes, str)):
        return str(value)
    try:
        return int(value) if isinstance(value, (int, np.integer)) else float(np.real(value))
    except (TypeError, ValueError):
        # Of other objects, only the kind is known to be the same on all workers.
        return type(value).__name__


def _changes_what_follows(operation: str) -> bool:
    """Whether a call of an operation may change what the next one returns."""
    # Python code; generators of Keras (such as those of `MixUp`) and of TensorFlow.
    return "PyFunc" in operation or operation.startswith(("Assign", "RngReadAndSkip"))


def _hash(dataset: tf.data.Dataset) -> dict[str, Any] | None:
    """TensorFlow's hash of a dataset's graph, empty for a large one, or None.

    It is final if the dataset's rows must not be read to compare them.
    """
    size, is_final, left = 0, False, [dataset]
    while left:
        one = left.pop()
        left += one._inputs()
        # Nothing but `fit` may write the file of a cache.
        is_final = is_final or type(one).__name__ == "CacheDataset"
        tensors = tf.nest.flatten(getattr(one, "_tensors", ()), expand_composites=True)
        size += sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
        for function in one._functions():
            graph = function.function.graph.as_graph_def()
            nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
            is_final = is_final or any(_changes_what_follows(node.op) for node in nodes)
    try:
        variant = dataset._variant_tensor
        found = 0 if size > _MOST_BYTES else tf.raw_ops.DatasetFingerprint(input_dataset=variant)
    except tf.errors.OpError:
        return None
    return {"graph": str(int(found) or ""), "is_final": is_final}
