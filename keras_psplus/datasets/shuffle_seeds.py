"""Gives the unseeded shuffles of a `tf.data.Dataset` one seed on all workers.

Workers that each shuffle in an order of their own and then take their share of every batch see
some elements twice and others never. A dataset's seeds are constants in its graph, so the graph is
written out, its zero seeds (TensorFlow's "not seeded") are set, and it is read back.
"""

import re
import zlib
from typing import Any

import tensorflow as tf

from keras_psplus.datasets.rows_before_maps import (
    constant_value,
    graph_of,
    has_stage,
    reads_service,
    scopes,
)
from keras_psplus.log import logger
from keras_psplus.tf_internals import dataset_ops, types_pb2

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
_STAGES = ("Shuffle", "Random", "Sampl", "FlatMap", "Interleave", "ParallelInterleave")
_AGAIN_EACH_EPOCH = ("reshuffle_each_iteration", "rerandomize_each_iteration")
# Resources that only hold what an iteration leaves in them; the new ones are empty.
_REPLACEABLE = {"CacheDatasetV2": (2, "DummyMemoryCache")}
_OF_THIS_PROCESS = re.compile(r"PyFunc|GeneratorDataset|HashTable|VarHandleOp")


def seed_shuffles(dataset: tf.data.Dataset, seed: int, apart: bool = False) -> tf.data.Dataset:
    """Returns the dataset with every unseeded source of order seeded.

    Args:
        seed: Python int, equal on all workers.
        apart: Whether to read the result does not move the dataset on to its next order.

    Returns:
        The dataset itself if its order is settled already, else an equal one with seeds.
    """
    if not has_stage(dataset, _STAGES):
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

    Returns:
        The serialized `GraphDef`.

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
