"""Rows of tables: on the wire, at first, and as they were before a step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.arguments import shown
from keras_psplus.compression import wire
from keras_psplus.core.batch.replica_step import TensorTraffic
from keras_psplus.core.graph.subgraph import Subgraph, operations_before
from keras_psplus.files.tables import rows_of
from keras_psplus.tables.rounding import BFLOAT16

# Rows of tables on the wire: words of float32, whatever they are compressed to.


# gRPC refuses messages of more than 4 MiB, and TensorFlow's RPC operations cannot be told
# otherwise. What is not rows takes little.
MESSAGE_BYTES = (4 << 20) - (64 << 10)

_ALLOWED = (
    'None, "bf16", "fp16", "int8", `Cast`, `Int8`, or a compressor of your own with `encode_rows` '
    "and `supports_values = True`"
)


class RowCodec:
    """Turns rows into words and back, each row by itself, beside `id_bytes` of its number."""

    def __init__(
        self, compressor: compression.Compressor | None, dim: int, id_bytes: int = 5
    ) -> None:
        self._compressor = compressor
        self._dim, self._id_bytes = dim, id_bytes
        self._like: Any = None
        self.width = dim
        if compressor is not None:
            with tf.init_scope():
                self._like = compressor.encode_rows(tf.zeros([1, dim]), tf.constant(0, tf.int64))
                self.width = int(wire.pack(self._like, 1).shape[1])

    @classmethod
    def of_pulls(
        cls, compressor: compression.Compressor | None, spec: Mapping[str, Any], id_bytes: int = 5
    ) -> "RowCodec":
        """Codec of rows that are read: in 16 bits if `spec` stores them so."""
        if compressor is None and spec.get("rows_dtype") == BFLOAT16:
            compressor = compression.Cast(BFLOAT16)
        return cls(compressor, spec["dim"], id_bytes)

    @property
    def rows_per_message(self) -> int:
        return MESSAGE_BYTES // (4 * self.width + self._id_bytes)

    def traffic(self, path: str, direction: str, ids: tf.Tensor) -> TensorTraffic:
        """Bytes of a table's rows, each of which travels with its number."""
        compressor, count = self._compressor, tf.size(ids, tf.int64)
        name = None if compressor is None else repr(compressor)
        with tf.device("CPU:0"):
            logical, sent, wire_bytes = (
                count * (4 * words) for words in (self._dim, self.width, self.width + 1)
            )
        return TensorTraffic(path, name, logical, sent, wire_bytes, direction=direction)

    def encode(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        if self._compressor is None:
            return rows
        payload = self._compressor.encode_rows(rows, step)
        return tf.ensure_shape(wire.pack(payload, tf.shape(rows)[0]), [None, self.width])

    def decode(self, words: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        if self._compressor is None:
            return words
        payload = wire.unpack(words, self._like, tf.shape(words)[0])
        rows = self._compressor.decode_rows(payload, (self._dim,), tf.float32, step)
        return tf.reshape(rows, [-1, self._dim])


def compressor_for_rows(
    argument: str, value: str | compression.Compressor | None
) -> compression.Compressor | None:
    """Converts a user's compression argument for rows to a `Compressor` or None."""
    compressor = compression.get(value, argument, _ALLOWED)
    if compressor is None:
        return None
    inner = getattr(compressor, "inner", compressor)
    by_rows = type(inner).encode_rows is not compression.Compressor.encode_rows
    if not by_rows or not inner.supports_values:
        raise ValueError(
            f"`{argument}` must keep every number of a row nearly as it is, as rows have no "
            f"residual: {_ALLOWED}. Received: {argument}={shown(value)}"
        )
    return inner


# Repeats what the ids of a batch are computed by, on those of another.


_OF_VARIABLES = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_INPUTS = ("Placeholder", "PlaceholderWithDefault")


class NotRepeatable(ValueError):
    """A tensor's computation must not be repeated, for the reason given."""


def repeat(tensor: tf.Tensor, sources: Mapping[Any, tf.Tensor]) -> tf.Tensor:
    """Repeats the operations between some tensors and one that is made of them.

    `sources` has, by references of tensors of the graph, those in their place. What does not depend
    on them is not repeated; NotRepeatable is raised of side effects and variables.
    """
    for operation in operations_before([tensor], sources):
        _check_repeatable(operation)
    return Subgraph([tensor], [reference.deref() for reference in sources]).repeat(
        sources, "next_batch"
    )[0]


def _check_repeatable(operation: tf.Operation) -> None:
    kind = operation.type
    if kind in _INPUTS or kind.startswith("LookupTable") or not operation.op_def.is_stateful:
        return
    if kind in _OF_VARIABLES or kind.startswith("Rpc"):
        raise NotRepeatable("its ids depend on variables, or on rows of a table")
    raise NotRepeatable(f"its ids depend on an operation that is not to be run twice ({kind})")


# Rows of a table on a server, and their initialization in parts.


# Larger tables are not made whole on every server, so their rows differ from one process's.
_WHOLE_BYTES = 1 << 30
_BLOCK_ROWS = 1 << 16
# Bytes that are made at once.
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

    Nothing else of a size near it is in memory meanwhile, but for initializers that need the whole
    table, such as `Orthogonal`.
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
    """Initial values as pairs of a first row and rows; little is one pair."""
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
    """Function that initializes a range of rows; None if it does more than elementwise work."""
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


# Undo log of the last step, for reading rows as they were before it.
#
#     version            7                            8
#     log                -        rows 3, 5           rows 3, 5 as of 7
#     table         rows as of 7    | update of 3, 5 |    rows as of 8
#     lookup(7)     all from the table                3, 5 from the log, the others from the table
#
# 1. `record` copies the rows that a step is about to change to the log, in place of the last
#    step's.
# 2. The optimizer updates these rows, and the shard increments `version`.
# 3. `lookup` at a step reads the table. If the table is one step further, rows in the log replace
#    it. It holds the lock of the updates, so that it sees none of them half done.


# Counts updates lost when a parameter server restarts.


_LONG = tf.int64
_UNKNOWN = -1


class MissingUpdates:
    """Counter of updates that a restart has lost, found from workers' pushes.

    A push's number is that of the step times `parts`, plus that of a part.
    """

    def __init__(self, replicas: int, parts: int) -> None:
        self._parts = parts
        self._lost = tf.Variable(tf.zeros([replicas], _LONG), trainable=False)

    def begin(self) -> None:
        """Expects pushes of all replicas that tell how far they are."""
        self._lost.assign(tf.fill(self._lost.shape, tf.constant(_UNKNOWN, _LONG)))

    def note(self, replica: tf.Tensor, push: tf.Tensor, last_push: tf.Tensor) -> tf.Tensor:
        """Counts, at the first push of a replica, those that it will not send again."""

        def count() -> tf.Tensor:
            whole = tf.maximum(push // self._parts - last_push // self._parts - 1, 0)
            # The first parts of this one may be lost as well.
            lost = whole + tf.cast(push % self._parts > 0, _LONG)
            noted = tf.raw_ops.ResourceScatterUpdate(
                resource=self._lost.handle, indices=replica, updates=lost
            )
            with tf.control_dependencies([noted]):
                return tf.identity(lost)

        known = self._lost.sparse_read(replica)
        return tf.cond(tf.equal(known, _UNKNOWN), count, lambda: known)

    def counted(self) -> tuple[int, bool]:
        lost = self._lost.numpy()
        return int(lost[lost != _UNKNOWN].sum()), bool((lost != _UNKNOWN).all())


_INT = tf.int32


class RowUndoLog:
    """The rows that one step has changed, as they were.

    A worker that asks ahead for the next batch's rows gets those of the same step, whether its
    request is faster or slower than the update that the others are making.
    """

    def __init__(self, weights: tf.Variable, version: tf.Variable) -> None:
        dim = weights.shape[1]
        self._weights, self._version = weights, version
        self._ids = tf.Variable(tf.zeros([0], _INT), shape=[None], trainable=False)
        self._rows = tf.Variable(tf.zeros([0, dim]), shape=[None, dim], trainable=False)

    def record(self, ids: tf.Tensor) -> None:
        """Keeps rows that are about to change, in place of those of the step before."""
        self._rows.assign(self._weights.sparse_read(ids), read_value=False)
        self._ids.assign(ids, read_value=False)

    def lookup(
        self, lock: tf.CriticalSection, encode: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    ) -> tf.types.experimental.PolymorphicFunction:
        """Makes a method that looks rows up as of this step or the last."""
        signature = [tf.TensorSpec([], _LONG), tf.TensorSpec([None], _INT)]

        @tf.function(input_signature=signature, autograph=False)
        def lookup_at(step: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
            def locked() -> tf.Tensor:
                return tf.cond(
                    tf.equal(step + 1, self._version.read_value()),
                    lambda: self._before(ids),
                    lambda: self._weights.sparse_read(ids),
                )

            rows = tf.ensure_shape(lock.execute(locked), [None, self._weights.shape[1]])
            return encode(rows, step)

        return lookup_at

    def _before(self, ids: tf.Tensor) -> tf.Tensor:
        changed = self._ids.read_value()
        order = tf.argsort(changed)
        in_order = tf.gather(changed, order)
        at = tf.searchsorted(in_order, ids)
        # One more of each, so that ids beyond the last one find something that is not theirs.
        was_changed = tf.equal(tf.gather(tf.concat([in_order, [-1]], 0), at), ids)
        rows = tf.pad(self._rows.read_value(), [[0, 1], [0, 0]])
        old = tf.gather(rows, tf.gather(tf.pad(order, [[0, 1]]), at))
        return tf.where(was_changed[:, tf.newaxis], old, self._weights.sparse_read(ids))
