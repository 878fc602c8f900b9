"""Rows of a table on a server, and their initialization in parts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.files.shard_files import rows_of
from keras_psplus.hybrid.rows.subgraph import repeat

# Larger tables are not made whole on every server, so their rows differ from one process's.
_WHOLE_BYTES = 1 << 30
_BLOCK_ROWS = 1 << 16
# What is made at once.
_PART_BYTES = 1 << 20
# Operations that make groups of four numbers from a counter, and how far it goes for a group.
_COUNTS = {
    "StatelessRandomUniformV2": 1,
    "StatelessRandomNormalV2": 1,
    "StatelessTruncatedNormalV2": 256,
}
_GROUP = 4
_ELEMENTWISE = {"AddV2", "Cast", "Identity", "Mul", "Sub"}


def make_variable(spec: dict[str, Any], server: int, servers: int) -> tf.Variable:
    """Makes a variable of this server's part of the table, with its first value.

    Nothing else of a size near the variable's is in memory meanwhile, but for initializers that
    need the whole table, such as `Orthogonal`.
    """
    own, dim = rows_of(spec["rows"], server, servers), spec["dim"]
    variable = tf.Variable(tf.zeros([own, dim]), trainable=False)
    if spec["initializer"] is None:
        return variable
    for first, values in _parts(spec, own, server, servers):
        ids = tf.range(first, first + values.shape[0])
        tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=ids, updates=values)
    return variable


def _parts(
    spec: Mapping[str, Any], own: int, server: int, servers: int
) -> Iterator[tuple[int, tf.Tensor]]:
    """Initial values of the server's rows, as pairs of a first row and values."""
    rows, dim = spec["rows"], spec["dim"]
    # Small beside the server's part.
    little = max(_PART_BYTES, 4 * own * dim // 16)
    if 4 * rows * dim <= _WHOLE_BYTES:
        for first, values in _ranges(spec["initializer"], (rows, dim), little):
            # Of the rows before the first one, some are this server's as well.
            yield rows_of(first, server, servers), values[(server - first) % servers :: servers]
        return
    for block in range(0, own, _BLOCK_ROWS):
        config = dict(spec["initializer"], config=dict(spec["initializer"]["config"]))
        seed = config["config"].get("seed")
        if isinstance(seed, int):
            config["config"]["seed"] = hash((seed, server, block)) % (1 << 31)
        shape = min(_BLOCK_ROWS, own - block), dim
        for first, values in _ranges(config, shape, little):
            yield block + first, values


def _ranges(config: Any, shape: tuple[int, int], little: int) -> Iterator[tuple[int, tf.Tensor]]:
    """Initial values of a shape in ranges, as pairs of a first row and rows.

    Args:
        config: The serialized initializer.
        shape: The shape.
        little: Bytes up to which all of it is made at once.
    """
    initializer, (rows, dim) = keras.initializers.deserialize(config), shape
    part = None
    if 4 * rows * dim > little:
        part = _by_ranges(initializer, rows, dim)
    if part is None:
        yield 0, initializer(shape, dtype="float32")
        return
    # So that each begins with a group.
    step = _GROUP * max(1, _PART_BYTES // (4 * dim * _GROUP))
    for first in range(0, rows, step):
        yield first, part(first, min(step, rows - first))


def _by_ranges(initializer: Any, rows: int, dim: int) -> Callable[[int, int], tf.Tensor] | None:
    """Function of a first row and a count that initializes only these rows.

    None if the initializer does more than random numbers, constants and elementwise operations.
    """
    is_possible = True

    @tf.function(
        input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int32)], autograph=False
    )
    def part(first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        nonlocal is_possible
        # Nobody needs this one's value, so that it is not computed.
        whole = initializer((rows, dim), dtype="float32")
        sources = _sources(whole)
        if sources is None:
            is_possible = False
            return whole
        own = {source.ref(): _of_range(source, first, count, dim) for source in sources}
        return repeat(whole, own)

    part.get_concrete_function()
    return part if is_possible else None


def _sources(whole: tf.Tensor) -> list[tf.Tensor] | None:
    """Source tensors of elementwise operations that compute a tensor, or None."""
    found, tensors = [], [whole]
    while tensors:
        tensor = tensors.pop()
        if tensor.op.type in _COUNTS or tensor.op.type == "Fill":
            found.append(tensor)
        elif tensor.shape.rank and tensor.op.type not in _ELEMENTWISE:
            return None
        else:
            tensors += [t for t in tensor.op.inputs if t.shape.rank]
        if tensor.shape.rank and tensor.shape != whole.shape:
            return None
    return found


def _of_range(source: tf.Tensor, first: tf.Tensor, count: tf.Tensor, dim: int) -> tf.Tensor:
    """Equivalent of an operation for a range of its rows."""
    kind, shape = source.op.type, [count, dim]
    if kind == "Fill":
        return tf.fill(shape, source.op.inputs[1])
    _, key, counter, algorithm = source.op.inputs
    groups = tf.cast(first * (dim * _COUNTS[kind]) // _GROUP, tf.uint64)
    # The upper half differs between seeds, the lower one begins with 0.
    counter += tf.stack([groups, tf.zeros_like(groups)])
    make = getattr(tf.raw_ops, kind)
    return make(shape=shape, key=key, counter=counter, alg=algorithm, dtype=source.dtype)
