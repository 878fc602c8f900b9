"""Gives the unseeded shuffles of a `tf.data.Dataset` one seed on all workers.

Workers that each shuffle in an order of their own and then take their share of every batch see
some elements twice and others never. A dataset's seeds are constants in its graph, so the graph is
written out, its zero seeds (TensorFlow's "not seeded") are set, and it is read back.
"""

import zlib

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.ops import dataset_ops

from keras_psplus.log import logger

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


def reseed(dataset, seed):
    """Returns the dataset with every unseeded source of order seeded.

    Args:
        dataset: `tf.data.Dataset`.
        seed: Python int, equal on all workers.

    Returns:
        The dataset itself if its order is settled already, else an equal one with seeds.
    """
    if not _may_be_unseeded(dataset):
        return dataset
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    try:
        serialized = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    except (tf.errors.OpError, ValueError) as error:
        logger.warning(
            "this dataset's unseeded shuffle could not be given one seed on all workers (%s): pass "
            "`seed=` to shuffle(), or workers will see some elements twice and others never",
            str(error).splitlines()[0],
        )
        return dataset
    graph = graph_pb2.GraphDef.FromString(serialized)
    scopes = [graph.node, *(function.node_def for function in graph.library.function)]
    changed = [node for nodes in scopes for node in _reseed_nodes(nodes, seed)]
    if not changed:
        return dataset
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    reseeded = dataset_ops._VariantDataset(variant, dataset.element_spec)
    return reseeded.with_options(dataset.options())


def _may_be_unseeded(dataset):
    """Whether a dataset below this one draws an order, by the names of the classes."""
    names = ("Shuffle", "Random", "Sampl", "FlatMap", "Interleave", "ParallelInterleave")
    if any(name in type(dataset).__name__ for name in names):
        return True
    return any(_may_be_unseeded(below) for below in dataset._inputs())


def _reseed_nodes(nodes, seed):
    """Gives unseeded nodes of one graph new constants; yields the nodes it changed."""
    by_name = {node.name: node for node in nodes}
    for node in list(nodes):
        *positions, generator = _SEEDED.get(node.op, (None,))
        constants = [by_name.get(node.input[i].split(":")[0]) for i in positions]
        if not constants or any(c is None or c.op != "Const" or _int_value(c) for c in constants):
            continue
        for position, constant in zip(positions, constants):
            seeded = nodes.add()
            seeded.CopyFrom(constant)
            seeded.name = f"{node.name.replace('/', '_')}_seed_{position}"
            # Its own value for each node: two shuffles of one dataset must not move alike.
            value = (seed + zlib.crc32(seeded.name.encode())) % (1 << 31) + 1
            seeded.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64, []))
            node.input[position] = node.input[position].replace(constant.name, seeded.name, 1)
        if generator is not None:
            # The original's generator is a resource of this process, drawn from its zero seeds. In
            # the place of one that leads nowhere, TensorFlow makes a new one from ours.
            nowhere = nodes.add(op="DummySeedGenerator")
            nowhere.name = f"{node.name.replace('/', '_')}_seed_generator"
            output = ":handle:0" if ":" in node.input[generator] else ""
            node.input[generator] = nowhere.name + output
        yield node


def _int_value(constant):
    return int(tf.make_ndarray(constant.attr["value"].tensor))
