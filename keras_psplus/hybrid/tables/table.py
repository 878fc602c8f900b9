"""A table from a worker's side: how its rows come and its gradients go."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.compression import Compressor
from keras_psplus.files.tables import rows_of
from keras_psplus.hybrid import calls
from keras_psplus.hybrid.calls import RpcClient
from keras_psplus.hybrid.rows import MESSAGE_BYTES, RowCodec
from keras_psplus.hybrid.servers import Servers

_INT, _LONG, _FLOAT = tf.int32, tf.int64, tf.float32
# Of a call that has been started: a function that waits for the answer.
_Answer: TypeAlias = Callable[[], tf.Tensor]


class Table:
    """Rows that lie on parameter servers: row `r` on server `r % servers`.

    Args:
        shape: Tuple of rows and numbers in a row.
        pull_compressor: Compressor of rows that are read, or None.
        push_compressor: Compressor of gradients, or None.
    """

    _id_bytes = 5

    def __init__(
        self,
        servers: Servers,
        key: int,
        name: str,
        shape: tuple[int, int],
        pull_compressor: Compressor | None,
        push_compressor: Compressor | None,
    ) -> None:
        self.servers, self.key, self.name = servers, key, name
        self.rows, self.dim = shape
        self.pull_codec = RowCodec(pull_compressor, self.dim, self._id_bytes)
        self.push_codec = RowCodec(push_compressor, self.dim, self._id_bytes)
        self.layer_name = name.rpartition("/")[0] or name
        self.regularizer: keras.regularizers.Regularizer | None = None
        self.constraint: keras.constraints.Constraint | None = None
        # Current optimizer, number of optimizers so far, total slot count.
        self.optimizer: keras.optimizers.Optimizer | None = None
        self.optimizers = self.slots = 0
        self._first_slot, self._slots_of = 1, None
        # Results of `config_of` for the optimizer, and of `check_cache` for a cache; or None.
        self.row_config: dict[str, Any] | None = None
        self.cache: dict[str, int] | None = None
        # By slot, how often all of it was set.
        self.assignments: dict[int, int] = {}
        self._links: dict[tuple[str, int], list[RpcClient]] = {}

    def method(self, what: str) -> str:
        return calls.method(self.key, what)

    def new_slot(self, optimizer: keras.optimizers.Optimizer) -> int:
        """The number of one more slot of an optimizer."""
        self.first_slot_of(optimizer)
        self.slots += 1
        return self.slots

    def first_slot_of(self, optimizer: keras.optimizers.Optimizer) -> int:
        """The number of the first slot of the optimizer that is being built."""
        if self._slots_of is not optimizer:
            self._first_slot, self._slots_of = self.slots + 1, optimizer
        return self._first_slot

    @property
    def slots_in_use(self) -> int:
        """Number of slots of the optimizer that updates the table now."""
        of_last = self._slots_of is not None and self._slots_of is self.optimizer
        return self.slots + 1 - self._first_slot if of_last else 0

    def method_of_optimizer(self, what: str) -> str:
        """The name of a method that belongs to the table's present optimizer."""
        return self.method(f"{what}{self.optimizers}")

    def links(self, purpose: str, replica: int = 0) -> list[RpcClient]:
        """A link to each server for one purpose of one local replica."""
        if (purpose, replica) not in self._links:
            self._links[purpose, replica] = self.servers.new_links()
        return self._links[purpose, replica]

    def split(self, ids: tf.Tensor, *others: tf.Tensor) -> list[tuple[Any, ...]]:
        """Shares out ids, and rows that belong to them, over the servers.

        Args:
            ids: int64 vector of row numbers.
            *others: Tensors with as many rows.

        Returns:
            For each server: int32 row numbers there, its part of each of the others, and the
            places of all this in `ids`.
        """
        count = len(self.servers)
        if count == 1:
            return [(tf.cast(ids, _INT), *others, None)]
        owners = tf.cast(ids % count, _INT)
        parts = [tf.cast(ids // count, _INT), *others, tf.range(tf.size(ids))]
        return list(zip(*(tf.dynamic_partition(part, owners, count) for part in parts)))

    def read(self, slot: int) -> np.ndarray:
        """Reads the whole table, or one of its optimizer's slots, as a NumPy array."""
        whole = np.empty([self.rows, self.dim], np.float32)
        count, most = len(self.servers), MESSAGE_BYTES // (4 * self.dim)
        with tf.init_scope():
            for server, link in enumerate(self.links("whole")):
                own = whole[server::count]
                for first in range(0, len(own), most):
                    rows = min(most, len(own) - first)
                    args = [tf.constant(first, _INT), tf.constant(rows, _INT)]
                    part = link.call(self.method(f"read{slot}"), args, _FLOAT, [None, self.dim])
                    own[first : first + rows] = part.numpy()
        return whole

    def write(self, slot: int, value: np.ndarray) -> None:
        """Sets the whole of the table, or of one of its optimizer's slots."""
        value = np.asarray(value, np.float32)
        count, most = len(self.servers), MESSAGE_BYTES // (4 * self.dim)
        with tf.init_scope():
            for server, link in enumerate(self.links("whole")):
                own = value[server::count]
                for first in range(0, rows_of(self.rows, server, count), most):
                    args = [tf.constant(first, _INT), tf.constant(own[first : first + most])]
                    link.call(self.method(f"write{slot}"), args, _INT, []).numpy()


def pull(
    table: Table,
    ids: tf.Tensor,
    replica: int,
    most: int | None = None,
    purpose: str = "pull",
    step: tf.Tensor | None = None,
    method: str = "lookup",
) -> tf.Tensor:
    """Brings rows.

    Args:
        ids: int64 vector of distinct row numbers in range.
        most: How many ids there are at most, if the graph can tell.
        purpose: Of the links; what may overlap needs its own links.
        step: int64 scalar, the number of updates after which to read, which may be one less than
            there are; None for rows as they are.
        method: The servers' method, of rows as they are.

    Returns:
        float32 tensor of shape `(len(ids), dim)`.
    """
    codec, first = table.pull_codec, [] if step is None else [step]
    method = table.method(method if step is None else "lookup_at")
    shape = [None, codec.width]
    parts = table.split(ids)
    waits = [
        _pull_from(link, method, first, own, shape, codec.rows_per_message, most)
        for link, (own, _) in zip(table.links(purpose, replica), parts)
    ]
    rows = [codec.decode(wait(), tf.constant(0, _LONG)) for wait in waits]
    if len(rows) == 1:
        return tf.ensure_shape(rows[0], [None, table.dim])
    return tf.ensure_shape(tf.dynamic_stitch([p for _, p in parts], rows), [None, table.dim])


def _pull_from(
    link: RpcClient,
    method: str,
    first: Sequence[tf.Tensor],
    ids: tf.Tensor,
    shape: Any,
    limit: int,
    most: int | None,
) -> _Answer:
    """Begins to read rows from one server, in as many messages as they need."""
    if most is not None and most <= limit:
        return link.start(method, [*first, ids], _FLOAT, shape)

    def in_parts() -> tf.Tensor:
        count = (tf.size(ids) + limit - 1) // limit
        rows = tf.TensorArray(_FLOAT, count, infer_shape=False, element_shape=shape)

        def one(i: tf.Tensor, rows: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            own = ids[i * limit : (i + 1) * limit]
            part = link.call(method, [*first, own], _FLOAT, shape)
            return i + 1, rows.write(i, part)

        return tf.while_loop(lambda i, _: i < count, one, (0, rows))[1].concat()

    answer = tf.cond(
        tf.size(ids) <= limit, lambda: link.call(method, [*first, ids], _FLOAT, shape), in_parts
    )
    return lambda: answer


def push(
    table: Table,
    slices: tuple[tf.Tensor, tf.Tensor],
    replica: int,
    header: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
    numbers: tf.Tensor,
    most: int | None = None,
    waits: int = 0,
) -> list[tf.Tensor]:
    """Sends gradients of rows.

    Args:
        slices: Pair of an int64 vector of distinct row numbers and their float32 gradients.
        header: Triple of int64 scalars: the replica's rank, its number of pushes before this one,
            and the optimizer's iterations.
        numbers: float32 vector: learning rate and scalars of the optimizer.
        most: How many ids there are at most, if the graph can tell.
        waits: 1 if the servers wait for `commit` before they apply the sum.

    Returns:
        List of tensors that are there once every server has taken its part.
    """
    codec, method = table.push_codec, table.method_of_optimizer("push")
    ids, rows = slices
    rank, step, iterations = header

    def arguments(part: Any, last: tf.Tensor, ids: tf.Tensor, words: tf.Tensor) -> list[tf.Tensor]:
        head = tf.stack(
            [rank, step, tf.cast(part, _LONG), last, tf.constant(waits, _LONG), iterations]
        )
        return [head, numbers, ids, words]

    finish = []
    for link, (own, own_rows, _) in zip(table.links("push", replica), table.split(ids, rows)):
        words = codec.encode(own_rows, step)
        finish.append(_push_to(link, method, arguments, own, words, codec, most))
    return [wait() for wait in finish]


push_to_wait = functools.partial(push, waits=1)


def _push_to(
    link: RpcClient,
    method: str,
    arguments: Callable[..., list[tf.Tensor]],
    ids: tf.Tensor,
    words: tf.Tensor,
    codec: RowCodec,
    most: int | None,
) -> _Answer:
    limit, one, none = codec.rows_per_message, tf.constant(1, _LONG), tf.constant(0, _LONG)
    if most is not None and most <= limit:
        return link.start(method, arguments(0, one, ids, words), _LONG, [])

    def whole() -> tf.Tensor:
        return link.call(method, arguments(0, one, ids, words), _LONG, [])

    def in_parts() -> tf.Tensor:
        last = (tf.size(ids) - 1) // limit

        def send(i: tf.Tensor, answer: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            own = slice(i * limit, (i + 1) * limit)
            args = arguments(i, none, ids[own], words[own])
            with tf.control_dependencies([answer]):
                return i + 1, link.call(method, args, _LONG, [])

        start = (0, none)
        _, answer = tf.while_loop(lambda i, _: i < last, send, start, parallel_iterations=1)
        with tf.control_dependencies([answer]):
            own = slice(last * limit, None)
            return link.call(method, arguments(last, one, ids[own], words[own]), _LONG, [])

    answer = tf.cond(tf.size(ids) <= limit, whole, in_parts)
    return lambda: answer


def norms(table: Table, replica: int) -> list[tf.Tensor]:
    """Sums of squares of what waits on each server, as a list of float32 scalars."""
    method = table.method_of_optimizer("norm")
    waits = [
        link.start(method, [tf.constant(0)], _FLOAT, []) for link in table.links("push", replica)
    ]
    return [wait() for wait in waits]


def commit(
    table: Table, replica: int, header: tuple[tf.Tensor, tf.Tensor], numbers: tf.Tensor
) -> list[tf.Tensor]:
    """Has the servers apply what waits.

    Args:
        header: Pair of int64 scalars: pushes before this one, and the optimizer's iterations.
        numbers: float32 vector: what to scale the gradient by, learning rate, and scalars of the
            optimizer.

    Returns:
        List of tensors that are there once every server has applied it.
    """
    method = table.method_of_optimizer("commit")
    waits = [
        link.start(method, [tf.stack(header), numbers], _LONG, [])
        for link in table.links("push", replica)
    ]
    return [wait() for wait in waits]
