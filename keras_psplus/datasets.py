"""Inspection and changes of the graph of a `tf.data.Dataset`: rows, seeds, the tf.data service."""

from __future__ import annotations

import collections
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_psplus.cluster.environment import RESTART_VARIABLE
from keras_psplus.keras_internals.keras_parts import is_class_weight_map
from keras_psplus.log import logger, warn_once
from keras_psplus.tf_internals import (
    batch_op,
    data_cardinality,
    data_service_pb2,
    dataset_ops,
    graph_pb2,
    map_op,
    op_def_registry,
    prefetch_op,
    repeat_op,
    shard_op,
    skip_op,
    take_op,
    types_pb2,
)
from keras_psplus.tf_internals import data_structure as structure

# Selection of each batch's rows before the maps, so workers map only theirs.
#
#     source -> map -> batch(8)      becomes      source -> rows 4 to 7 of each 8 -> map -> batch(4)
#
# Elements are counted before the maps as they are behind them, so every batch has the same rows.
# Stages behind the batch, and stages between the maps and the batch that depend on more than
# positions, forbid it; so do maps that keep state from one element to the next.

# The graph of a `tf.data.Dataset`: its stages, and the constants that they are made with.


def graph_of(dataset: tf.data.Dataset) -> graph_pb2.GraphDef:
    """Writes a dataset out as a `GraphDef`."""
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    serialized = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    return graph_pb2.GraphDef.FromString(serialized)


def scopes(graph: graph_pb2.GraphDef) -> list[Any]:
    """Lists of nodes of a `GraphDef`: the graph's, and each function's."""
    return [graph.node, *(function.node_def for function in graph.library.function)]


def constant_value(node: Any) -> np.ndarray:
    return tf.make_ndarray(node.attr["value"].tensor)


def reads_service(node: Any) -> bool:
    return node.op.startswith("DataServiceDataset")


def has_stage(dataset: tf.data.Dataset, names: Sequence[str]) -> bool:
    """Whether the class name of a dataset, or of its inputs, contains a text."""
    if any(name in type(dataset).__name__ for name in names):
        return True
    return any(has_stage(below, names) for below in dataset._inputs())


# Checks of `Dataset.map` functions: whether one may be run on some elements only.
#
# It may, if its result for an element depends on that element alone. The operations in its graph
# show it: stateful operations are registered as such.


# They have state, and nothing that they return depends on how often they have run.
_READ_ONLY = {
    "Assert",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "Print",
    "PrintV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
}
# They have the state of the functions that they call, which are looked at as well.
_CALLS = {"Case", "If", "StatefulPartitionedCall", "While"}
_CHANGES = re.compile(
    r"Assign|Resource(Scatter|Apply)|Rng|Stateful|LookupTable(Insert|Remove|Import)|.*Queue|.*Stack"
)
_PYTHON = {"EagerPyFunc", "PyFunc"}


def objection(function: Any, is_trusted: bool) -> str | None:
    """Says why a function must see all elements, in their order.

    Args:
        function: `ConcreteFunction` of a map.
        is_trusted: Whether the script has said that its maps keep nothing from one element to the
            next; it is believed where the graph does not show the contrary.
    """
    graph = function.graph.as_graph_def()
    functions = {function.signature.name for function in graph.library.function}
    for nodes in scopes(graph):
        for node in nodes:
            found = _objection_to_operation(node, functions, is_trusted)
            if found:
                return found
    return None


def _objection_to_operation(node: Any, functions: set[str], is_trusted: bool) -> str | None:
    if node.op in _READ_ONLY or node.op in _CALLS or node.op in functions:
        return None
    definition = op_def_registry.get(node.op)
    if definition is not None and not definition.is_stateful:
        return None
    if "seed" in node.attr and "seed2" in node.attr:
        # Without seeds, one process would draw others at its next start.
        is_seeded = node.attr["seed"].i or node.attr["seed2"].i
        return f"draws random numbers from a seed ({node.op})" if is_seeded else None
    if _CHANGES.match(node.op):
        return f"changes a state ({node.op})"
    if is_trusted:
        return None
    what = "runs Python code" if node.op in _PYTHON else "may keep a state"
    return f"{what} ({node.op}), and AutoShardPolicy.DATA does not say that it keeps none"


_as_it_is = tf.autograph.experimental.do_not_convert
_BATCHES = (batch_op._BatchDataset, batch_op._ParallelBatchDataset)
_MAPS = (map_op._MapDataset, map_op._ParallelMapDataset)
# Specs of elements before the maps that a worker can be given.
_ELEMENTS = (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)

_Remake = Callable[[Any, tf.data.Dataset], tf.data.Dataset]
# Stages that let all elements pass, or choose some by their positions, and how each is made again.
_PASSING: dict[type, _Remake] = {
    # Options are set on the whole.
    dataset_ops._OptionsDataset: lambda stage, dataset: dataset,
    prefetch_op._PrefetchDataset: lambda stage, dataset: dataset.prefetch(int(stage._buffer_size)),
}
_CHOOSING: dict[type, _Remake] = {
    data_cardinality._AssertCardinalityDataset: lambda stage, dataset: dataset.apply(
        tf.data.experimental.assert_cardinality(stage._expected_cardinality)
    ),
    repeat_op._RepeatDataset: lambda stage, dataset: dataset.repeat(stage._count),
    shard_op._ShardDataset: lambda stage, dataset: dataset.shard(stage._num_shards, stage._index),
    skip_op._SkipDataset: lambda stage, dataset: dataset.skip(stage._count),
    take_op._TakeDataset: lambda stage, dataset: dataset.take(stage._count),
}
_REMAKES = {**_PASSING, **_CHOOSING}


class Pipeline(NamedTuple):
    """A dataset of batches, taken apart.

    Attributes:
        elements: `tf.data.Dataset` of what goes into the maps; all workers have all of it.
        row_stages: Stages that each worker runs on its own rows, the first one first.
        batch_size: Rows of a batch.
        drops_remainder: Whether a last batch with fewer rows is left out.
        parallel_calls: How many batches are put together at a time; None for one.
        batch_stages: Stages behind the batch, the first one first.
        spec: Type specification of its batches.
        summary: Text that says what each worker maps of its own rows, and what of all.
    """

    elements: tf.data.Dataset
    row_stages: tuple[Any, ...]
    batch_size: int
    drops_remainder: bool
    parallel_calls: Any
    batch_stages: tuple[Any, ...]
    options: tf.data.Options
    spec: Any
    summary: str

    @property
    def is_even(self) -> bool:
        """Whether all batches have as many rows."""
        return self.drops_remainder or bool(
            self.elements.cardinality() == tf.data.INFINITE_CARDINALITY
        )

    def of_rows(
        self, elements: tf.data.Dataset, start: Callable[[tf.Tensor], tf.Tensor], count: int
    ) -> tf.data.Dataset:
        """Makes the dataset again, of some rows of each batch.

        Args:
            start: Function from the number of rows of a batch to the first one that is wanted.
            count: How many rows are wanted, or all from the first one if there are fewer.

        Returns:
            `tf.data.Dataset` of pairs: the number of rows of the batch for each of the rows, and
            what the batch has of these.
        """
        dataset = _rows(elements, self.batch_size, self.drops_remainder, start, count)
        for stage in self.row_stages:
            make_again = _map_rows if isinstance(stage, _MAPS) else _remake
            dataset = make_again(stage, dataset)
        calls = self.parallel_calls
        dataset = dataset.batch(
            count,
            drop_remainder=self.drops_remainder,
            num_parallel_calls=calls,
            deterministic=None if calls is None else True,
        )
        for stage in self.batch_stages:
            make_again = _weigh_classes if isinstance(stage, _MAPS) else _remake
            dataset = make_again(stage, dataset)
        return dataset.with_options(self.options)


def take_apart(dataset: tf.data.Dataset, is_trusted: bool) -> Pipeline | str:
    """Finds the maps of a dataset that may run on some rows of each batch.

    Returns:
        `Pipeline`, or the reason why there is no such map.
    """
    stage, batch_stages = dataset, []
    while isinstance(stage, tuple(_REMAKES)) or _weighs_classes(stage):
        batch_stages.append(stage)
        stage = stage._input_dataset
    if not isinstance(stage, _BATCHES):
        if not any("Batch" in type(below).__name__ for below in _line(stage)):
            return "it has no batch() at its end"
        return f"{_name(stage)} may need all rows of a batch"
    batch, size = stage, tf.get_static_value(stage._batch_size)
    drops_remainder = tf.get_static_value(stage._drop_remainder)
    if size is None or drops_remainder is None:
        return "its batch size is not known"
    if getattr(batch, "_deterministic", None) == "false":
        return "its batches are in no fixed order"
    # Sparse rows are as wide as the widest one of their batch.
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(batch.element_spec)):
        return "its batches are not dense"
    elements, passed, reason = batch._input_dataset, [], ""
    stages = []
    for stage in _line(elements):
        reason = _objection_to(stage, is_trusted)
        if reason:
            break
        passed.append(stage)
        if isinstance(stage, _MAPS):
            elements, stages = stage._input_dataset, list(passed)
    maps = sum(isinstance(stage, _MAPS) for stage in stages)
    others = sum(isinstance(stage, _MAPS) for stage in _line(batch)) - maps
    if not maps:
        has_maps = others or len(stage._inputs()) > 1
        return reason if has_maps else "it has no map() before the batch"
    if not all(isinstance(leaf, _ELEMENTS) for leaf in tf.nest.flatten(elements.element_spec)):
        return "what its maps are given cannot be handed on"
    stages.reverse()
    for stage in stages:
        below = stage._input_dataset
        if isinstance(stage, tuple(_CHOOSING)):
            if _is_shuffle(elements) and not _is_shuffle(below):
                # TensorFlow would fuse the shuffle with a repeat that a map was between, and draws
                # other seeds then where the whole is repeated once more.
                elements = elements.prefetch(1)
            elements = _remake(stage, elements)
    row_stages = tuple(stage for stage in stages if not isinstance(stage, tuple(_CHOOSING)))
    summary = f"each worker maps only its own rows ({_count(maps)} before the batch"
    summary += f"; {others} more on all rows: {reason})" if others else ")"
    return Pipeline(
        elements,
        row_stages,
        int(size),
        bool(drops_remainder),
        getattr(batch, "_num_parallel_calls", None),
        tuple(reversed(batch_stages)),
        dataset.options(),
        dataset.element_spec,
        summary,
    )


def _is_shuffle(dataset: tf.data.Dataset) -> bool:
    return "Shuffle" in type(dataset).__name__


def _line(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """A dataset and those below it, as long as there is one."""
    while dataset is not None:
        yield dataset
        below = dataset._inputs()
        dataset = below[0] if len(below) == 1 else None


def _objection_to(stage: tf.data.Dataset, is_trusted: bool) -> str:
    """Reason why stages up to this one must see all elements; empty if none."""
    if isinstance(stage, tuple(_REMAKES)):
        return ""
    if not isinstance(stage, _MAPS):
        return f"{_name(stage)} is between maps and batch"
    if getattr(stage, "_deterministic", None) == "false":
        return f"{_name(stage)} hands on what is ready first"
    if not stage._preserve_cardinality:
        return f"{_name(stage)} may end the data"
    found = objection(stage._map_func.function, is_trusted)
    return f"a map {found}" if found else ""


def _name(stage: tf.data.Dataset) -> str:
    """Name of a stage in a script, as far as its class shows."""
    words = re.findall("[A-Z][a-z]*", type(stage).__name__.removesuffix("Dataset"))
    return "_".join(word.lower() for word in words if word != "Parallel") + "()"


def _count(maps: int) -> str:
    return "1 map" if maps == 1 else f"{maps} maps"


def _remake(stage: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    return next(make for kind, make in _REMAKES.items() if isinstance(stage, kind))(stage, dataset)


def _rows(
    elements: tf.data.Dataset,
    batch_size: int,
    drops_remainder: bool,
    start: Callable[[tf.Tensor], tf.Tensor],
    count: int,
) -> tf.data.Dataset:
    """Selects `count` elements of each batch from `start` on.

    Each has the batch's number of rows with it.
    """
    windows = elements.window(batch_size, drop_remainder=drops_remainder)
    spec = windows.element_spec

    @_as_it_is
    def chosen(*window: Any) -> tf.data.Dataset:
        # A dataset for each part of the elements.
        window = window if type(spec) is tuple else window[0]
        rows = tf.cast(tf.nest.flatten(window)[0].cardinality(), tf.int32)
        of_window = tf.data.Dataset.zip(window).skip(tf.cast(start(rows), tf.int64)).take(count)
        return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(rows).repeat(), of_window))

    return windows.flat_map(chosen)


def _map_rows(stage: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    function = stage._map_func.function
    spec_before, spec_after = stage._input_dataset.element_spec, stage.element_spec

    @_as_it_is
    def mapped(rows: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
        # Not the script's own function: traced again, it might be another one.
        tensors = function(*structure.to_tensor_list(spec_before, element))
        return rows, structure.from_tensor_list(spec_after, tensors)

    if isinstance(stage, map_op._MapDataset):
        return dataset.map(mapped, synchronous=stage._force_synchronous)
    return dataset.map(
        mapped,
        num_parallel_calls=stage._num_parallel_calls,
        deterministic=True,
        use_unbounded_threadpool=stage._use_unbounded_threadpool,
    )


def _weighs_classes(stage: tf.data.Dataset) -> bool:
    return isinstance(stage, _MAPS) and is_class_weight_map(stage._map_func._func)


def _weigh_classes(stage: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    function, spec = stage._map_func._func, stage._input_dataset.element_spec

    @_as_it_is
    def weighed(rows: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        return rows, function(*batch) if type(spec) is tuple else function(batch)

    return dataset.map(weighed)


# Gives the unseeded shuffles of a `tf.data.Dataset` one seed on all workers.
#
# Workers that each shuffle in an order of their own and then take their share of every batch see
# some elements twice and others never. A dataset's seeds are constants in its graph, so the graph
# is written out, its zero seeds (TensorFlow's "not seeded") are set, and it is read back.

# Positions of the inputs `seed`, `seed2` and, where there is one, `seed_generator`.
_SEEDED = {
    "ShuffleDataset": (2, 3, None),
    "ShuffleDatasetV3": (2, 3, 4),
    "ShuffleAndRepeatDataset": (2, 3, None),
    "ShuffleAndRepeatDatasetV2": (2, 3, 5),
    "RandomDataset": (0, 1, None),
    "RandomDatasetV2": (0, 1, 2),
    "SamplingDataset": (2, 3, None),
}
_OF_ORDER = ("Shuffle", "Random", "Sampl", "FlatMap", "Interleave", "ParallelInterleave")
_AGAIN_EACH_EPOCH = ("reshuffle_each_iteration", "rerandomize_each_iteration")
# Resources that only hold what an iteration leaves in them; the new ones are empty.
_REPLACEABLE = {"CacheDatasetV2": (2, "DummyMemoryCache")}
_OF_THIS_PROCESS = re.compile(r"PyFunc|GeneratorDataset|HashTable|VarHandleOp")


def seed_shuffles(dataset: tf.data.Dataset, seed: int, apart: bool = False) -> tf.data.Dataset:
    """Returns the dataset with every unseeded source of order seeded.

    Args:
        seed: Python int, equal on all workers.
        apart: Whether to read the result does not move the dataset on to its next order.
    """
    if not has_stage(dataset, _OF_ORDER):
        return dataset
    try:
        graph = graph_of(dataset)
    except (tf.errors.OpError, ValueError) as error:
        logger.warning(
            "this dataset's unseeded shuffle could not be given one seed on all workers (%s): pass "
            "`seed=` to shuffle(), or workers will see some elements twice and others never",
            str(error).splitlines()[0],
        )
        return dataset
    if not _seed_graph(graph, seed, epoch=0 if apart else None):
        return dataset
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    reseeded = dataset_ops._VariantDataset(variant, dataset.element_spec)
    return reseeded.with_options(dataset.options())


def serialize(dataset: tf.data.Dataset, seed: int, epoch: int = 0) -> bytes:
    """Writes a dataset out as a graph that yields one order wherever it is read.

    Args:
        seed: Python int, what unseeded shuffles are seeded with.
        epoch: Number of the pass over the data: shuffles that reshuffle each time have another
            order in each.

    Raises:
        ValueError: If the dataset needs something of this process (a Python function, a generator,
            a lookup table), or the order is not its own: the tf.data service hands an element to
            the reader that asks for it first.
    """
    try:
        graph = graph_of(dataset)
    except (tf.errors.OpError, ValueError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    if any(reads_service(node) for nodes in scopes(graph) for node in nodes):
        raise ValueError("it reads from the tf.data service")
    _seed_graph(graph, seed, epoch)
    for nodes in scopes(graph):
        for node in list(nodes):
            if node.op in _REPLACEABLE:
                _replace_resource(nodes, node, *_REPLACEABLE[node.op])
        used = {name.split(":")[0] for node in nodes for name in node.input}
        for node in nodes:
            is_resource = node.op == "Const" and node.attr["dtype"].type == types_pb2.DT_RESOURCE
            if _OF_THIS_PROCESS.search(node.op) or (is_resource and node.name in used):
                raise ValueError(f"it uses {node.op} ({node.name})")
    return graph.SerializeToString()


def _seed_graph(graph: Any, seed: int, epoch: int | None = None) -> bool:
    """Gives shuffles seeds in place; returns whether there was one to give.

    With an epoch, those that have seeds get others for each epoch, and all get seed generators
    that do not depend on this process.
    """
    return any([_seed_nodes(nodes, seed, epoch) for nodes in scopes(graph)])


def _seed_nodes(nodes: Any, seed: int, epoch: int | None) -> bool:
    """Seeds the shuffling nodes of one graph; returns whether there are any."""
    by_name = {node.name: node for node in nodes}
    changed = False
    for node in list(nodes):
        *positions, generator = _SEEDED.get(node.op, (None,))
        constants: list[Any] = [by_name.get(node.input[i].split(":")[0]) for i in positions]
        if not constants or any(c is None or c.op != "Const" for c in constants):
            continue
        own = [int(constant_value(constant)) for constant in constants]
        if any(own) and epoch is None:
            continue
        changed = True
        again = any(name in node.attr and node.attr[name].b for name in _AGAIN_EACH_EPOCH)
        shift = (epoch or 0) if again else 0
        if any(own) and not shift:
            positions = []
        for position, constant, value in zip(positions, constants, own):
            seeded = nodes.add()
            seeded.CopyFrom(constant)
            seeded.name = f"{node.name.replace('/', '_')}_seed_{position}"
            # Its own value for each node: two shuffles of one dataset must not move alike.
            new = value if any(own) else seed + zlib.crc32(seeded.name.encode())
            new = (new + shift) % (1 << 31) + 1
            seeded.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(new, tf.int64, []))
            node.input[position] = node.input[position].replace(constant.name, seeded.name, 1)
        if generator is not None:
            # The original's generator is a resource of this process, drawn from its seeds. In the
            # place of one that leads nowhere, TensorFlow makes a new one from ours.
            _replace_resource(nodes, node, generator, "DummySeedGenerator")
    return changed


def _replace_resource(nodes: Any, node: Any, position: int, kind: str) -> None:
    new = nodes.add(op=kind)
    new.name = f"{node.name.replace('/', '_')}_{kind}"
    output = ":handle:0" if ":" in node.input[position] else ""
    node.input[position] = new.name + output


# Datasets that read from the tf.data service, and whether several workers may read them so.
#
# The service hands out each element of a job once, to whichever reader asks first. Readers that
# name a job share it. A reader that does not has its own job, with all elements in another order.

_OF_SERVICE = ("DataService", "Variant", "FlatMap", "Interleave")
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
    if not isinstance(dataset, tf.data.Dataset) or not has_stage(dataset, _OF_SERVICE):
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


def check_job_gave_rows(dataset: tf.data.Dataset) -> None:
    """Raises for an epoch without batches, if an exhausted job may be the reason."""
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
