"""Tensors on one hop of replicas: in buckets, and in rows, one for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import Compressor, wire
from keras_psplus.compression.methods import without_feedback

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates

DEFAULT_BUCKET_BYTES = 4 << 20
_MOST_PIECES = 8
# Buckets whose copies are in memory at once; the next one is on its way while one is summed.
_UNDER_WAY = 2
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


def sum_packed(launcher: Launcher, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors of static shapes over all replicas, by one collective for each dtype."""
    summed = list(tensors)
    for dtype in sorted({t.dtype.name for t in tensors}):
        own = [i for i, t in enumerate(tensors) if t.dtype.name == dtype]
        if len(own) == 1:
            summed[own[0]] = launcher.all_reduce(tensors[own[0]])
            continue
        packed = tf.concat([tf.reshape(tensors[i], [-1]) for i in own], 0)
        sizes = [tensors[i].shape.num_elements() for i in own]
        for i, piece in zip(own, tf.split(launcher.all_reduce(packed), sizes)):
            summed[i] = tf.reshape(piece, tensors[i].shape)
    return summed


def after(operations: Sequence[tf.Operation | tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, for what is to wait for these operations (or tensors) too."""
    if not operations:
        return tensor
    with tf.control_dependencies(operations):
        return tf.identity(tensor)


class HopOrder:
    """Limits the number of concurrent sends along one hop, of a ring or a topology.

    Sends wait for earlier ones, so that what is sent first arrives first. Gradients are ready long
    before a slow link has sent them: else their copies would all be in memory. All replicas of a
    hop have to send in the same order.
    """

    def __init__(self, at_once: int = _UNDER_WAY) -> None:
        self._at_once = at_once
        self._arrived: list[list[tf.Tensor]] = []

    def _before(self) -> list[tf.Tensor]:
        return self._arrived[-self._at_once] if len(self._arrived) >= self._at_once else []

    def wait(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns `tensors`, made to wait for earlier sends on the hop."""
        return [after(self._before(), tensor) for tensor in tensors]

    def waiting(self) -> AbstractContextManager[Any]:
        return tf.control_dependencies(self._before())

    def end(self, tensors: list[tf.Tensor]) -> None:
        """Marks the last send as complete; `tensors` are its results."""
        self._arrived.append(tensors)


def pieces(tensor: tf.Tensor, size: int, multiple: int) -> list[tf.Tensor]:
    """Flat pieces of a tensor, of at least `size` bytes and a `multiple` of elements."""
    elements = tensor.shape.num_elements()
    count = min(max(1, int(elements * tensor.dtype.size // size)), _MOST_PIECES)
    flat, length = tf.reshape(tensor, [-1]), -(-elements // count // multiple) * multiple
    return [flat[start : start + length] for start in range(0, elements, length)]


def buckets(
    items: Iterable[_Item],
    key: Callable[[_Item], _Key],
    size: Callable[[_Item], int],
    bucket_bytes: int,
) -> list[tuple[_Key, list[_Item]]]:
    """Groups items of one key, closing a bucket once it is full.

    An item that would fill one by itself has it for itself, so that nothing large is copied to go
    with others.

    Returns:
        List of `(key, items)`, in the order of the buckets' last items: what is made in the order
        of items is complete in that of buckets. What has not become full comes behind all others
        of its key: in front of one, it would be one of the few that are on their way at a time.
    """
    filling: dict[_Key, list[_Item]] = {}
    sizes: dict[_Key, int] = {}
    # By the place of its last item.
    closed: list[tuple[int, _Key, list[_Item]]] = []
    ends: dict[_Key, int] = {}
    for place, item in enumerate(items):
        kind, own = key(item), size(item)
        ends[kind] = place
        if own >= bucket_bytes:
            closed.append((place, kind, [item]))
            continue
        filling.setdefault(kind, []).append(item)
        sizes[kind] = sizes.get(kind, 0) + own
        if sizes[kind] >= bucket_bytes:
            closed.append((place, kind, filling.pop(kind)))
            sizes.pop(kind)
    closed += [(ends[kind], kind, rest) for kind, rest in filling.items()]
    return [(kind, bucket) for _, kind, bucket in sorted(closed, key=lambda one: one[0])]


# Rows of tensors: one for each replica of a hop.


# Matrices of fewer rows for each shard are cut like vectors: filling up would add more than 1/8.
_LEAST_ROWS = 8
# Joined rows of more than so many blocks are lengthened to whole ones.
_LONG_ROW = 32


class Cut(NamedTuple):
    """Layout of a tensor that is cut into shards.

    Attributes:
        shape: Static shape of the tensor.
        shard: That of each shard: rows of its matrix, so that low-rank compressors can work on it,
            or a vector.
    """

    shape: tf.TensorShape
    shard: tuple[int, ...]
    number: int

    @classmethod
    def of(cls, tensor: tf.Tensor, number: int) -> Cut:
        """Cuts a tensor of static shape into so many shards of one shape."""
        size = tensor.shape.num_elements()
        if tensor.shape.rank > 1:
            columns = tensor.shape[-1]
            rows = size // columns
            if rows % number == 0 or rows >= _LEAST_ROWS * number:
                return cls(tensor.shape, (-(-rows // number), columns), number)
        return cls(tensor.shape, (-(-size // number),), number)

    @property
    def width(self) -> int:
        """Number of elements of a shard."""
        return tf.TensorShape(self.shard).num_elements()

    def rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor as a matrix, one row for each shard, filled up with zeros."""
        flat = tf.reshape(tensor, [-1])
        missing = self.number * self.width - self.shape.num_elements()
        if missing:
            flat = tf.pad(flat, [[0, missing]])
        return tf.reshape(flat, [self.number, self.width])

    def whole(self, rows: tf.Tensor) -> tf.Tensor:
        """The inverse of `rows`."""
        flat = tf.reshape(rows, [-1])
        return tf.reshape(flat[: self.shape.num_elements()], self.shape)


def rows_of(tensors: Sequence[tf.Tensor], cuts: Sequence[Cut]) -> tf.Tensor:
    """Concatenates tensors of one dtype to a matrix with one row per shard."""
    return _side_by_side([cut.rows(tensor) for cut, tensor in zip(cuts, tensors)])


def wholes_of(rows: tf.Tensor, cuts: Sequence[Cut]) -> list[tf.Tensor]:
    """The inverse of `rows_of`."""
    return [cut.whole(part) for cut, part in zip(cuts, _split(rows, cuts))]


def shards_of(row: tf.Tensor, cuts: Sequence[Cut]) -> list[tf.Tensor]:
    """The shards in one row of what `rows_of` returns."""
    return [tf.reshape(part, cut.shard) for cut, part in zip(cuts, _split(row, cuts))]


def row_of(shards: Sequence[tf.Tensor]) -> tf.Tensor:
    """The inverse of `shards_of`."""
    return _side_by_side([tf.reshape(shard, [1, -1]) for shard in shards])


def _side_by_side(matrices: Sequence[tf.Tensor]) -> tf.Tensor:
    return matrices[0] if len(matrices) == 1 else tf.concat(matrices, 1)


def _split(rows: tf.Tensor, cuts: Sequence[Cut]) -> list[tf.Tensor]:
    return [rows] if len(cuts) == 1 else tf.split(rows, [cut.width for cut in cuts], 1)


class Joined:
    """Layout of tensors that are joined end to end, then cut into equal rows.

    Args:
        multiple: Number of elements of which long rows have a multiple.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], number: int, multiple: int) -> None:
        self._tensors, self._number = tensors, number
        self._sizes = [tensor.shape.num_elements() for tensor in tensors]
        self.width = -(-sum(self._sizes) // number)
        if self.width > _LONG_ROW * multiple:
            # Whole blocks need no copies with padding.
            self.width = -(-self.width // multiple) * multiple
        self._padding = number * self.width - sum(self._sizes)
        # A copy is what it costs; large tensors have their own buckets.
        self._is_whole = len(tensors) == 1 and not self._padding

    def rows(self) -> tf.Tensor:
        """The tensors as a float32 matrix, filled up with zeros."""
        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in self._tensors]
        joined = flat[0] if self._is_whole else tf.concat([*flat, tf.zeros([self._padding])], 0)
        return tf.reshape(joined, [self._number, self.width])

    def wholes(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Tensors, of their shapes and dtypes, of such a matrix."""
        sizes = [*self._sizes, self._padding]
        parts = [rows] if self._is_whole else tf.split(tf.reshape(rows, [-1]), sizes)
        return [tf.cast(tf.reshape(p, t.shape), t.dtype) for p, t in zip(parts, self._tensors)]


class Coding:
    """Encoding of rows on one hop, and what earlier steps have left out.

    Args:
        compressor: `Compressor` that `supports_reduce_scatter`, perhaps in `ErrorFeedback`.
        step: int64 scalar, the same on all replicas.
        states: `ReplicaStates` where what is left out is kept; not needed without `ErrorFeedback`.

    Attributes:
        words: What is sent.
    """

    def __init__(
        self,
        compressor: Compressor,
        step: tf.Tensor,
        states: ReplicaStates | None = None,
        name: str = "",
    ) -> None:
        self._compressor, self._inner = compressor, without_feedback(compressor)
        self._step, self._states, self._name = step, states, name

    def encode(self, rows: tf.Tensor) -> tf.Tensor:
        """Encodes a float32 matrix, each row by itself, as words."""
        state: Any = ()
        if self._compressor is not self._inner:
            assert self._states is not None
            first = functools.partial(self._compressor.init, rows.shape, tf.float32)
            state = self._states.read(self._name, first)
        self._payload, self._left = wire.encode_rows(self._compressor, rows, state, self._step)
        self._width, self.words = rows.shape[1], compression.pack(self._payload, rows.shape[0])
        return self.words

    def decode(self, words: tf.Tensor, rows: int) -> tf.Tensor:
        """Decodes rows of several replicas."""
        like = [tf.TensorSpec([rows, *part.shape[1:]], part.dtype) for part in self._payload]
        payload = compression.unpack(words, like, rows)
        return wire.decode_rows(self._inner, payload, self._width, self._step)

    def decode_sum(self, words: tf.Tensor, rows: int) -> tf.Tensor:
        """Decodes as many rows as were encoded, and sums them to one."""
        payload = compression.unpack(words, self._payload, rows)
        return wire.decode_sum(self._inner, payload, self._width, rows, self._step)

    def keep(
        self, decoded: Callable[[], tf.Tensor] | None = None, last: Sequence[tf.Tensor] = ()
    ) -> None:
        """Keeps what was left out for the next step.

        Args:
            decoded: Function that returns what was encoded, as it is decoded. It may not be needed.
            last: Tensors that are computed before that is done once more.
        """
        if self._compressor is self._inner:
            return

        def own() -> tf.Tensor:
            payload = tuple(after(last, part) for part in self._payload)
            return self._inner.decode_rows(payload, (self._width,), tf.float32, self._step)

        assert self._states is not None
        self._states.write(self._name, self._left(decoded or own))


class Hop(NamedTuple):
    """The replicas that exchange something, as one of them sees them.

    TensorFlow has no reduce-scatter on CPUs: rows are exchanged, and each replica sums its row.
    With replicas r0, r1 and r2, whose matrices have the rows a, b and c:

                   scatter: exchange           sum              gather
         r0        a0 a1 a2 -> a0 b0 c0 ->  s0 = a0+b0+c0  ->  s0 s1 s2
         r1        b0 b1 b2 -> a1 b1 c1 ->  s1 = a1+b1+c1  ->  s0 s1 s2
         r2        c0 c1 c2 -> a2 b2 c2 ->  s2 = a2+b2+c2  ->  s0 s1 s2

    With a `Coding`, rows are encoded before they are sent, and float32. All replicas decode the
    same, also the one whose row it is.

    Attributes:
        ranks: Their ranks among all replicas, in order, which is that of what is gathered.
        place: This replica's place among them.
    """

    launcher: Launcher
    ranks: Sequence[int]
    place: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def ring_bytes(self, payload: int) -> int:
        """Bytes that a replica sends for so many that are added up on their way."""
        return round(2 * (self.size - 1) * payload / self.size)

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors of static shapes, by one collective for each dtype."""
        return sum_packed(self.launcher, tensors)

    def scatter(self, rows: tf.Tensor, coding: Coding | None = None) -> tf.Tensor:
        """Reduce-scatter: sums a matrix with one row per replica; each receives its row."""
        if coding is not None:
            return coding.decode_sum(self.launcher.all_to_all(coding.encode(rows)), self.size)
        received = self._exchanged(rows)
        # As in a ring, the sum of what takes two bytes has more on its way.
        wide = tf.float32 if rows.dtype.is_floating and rows.dtype.size == 2 else rows.dtype
        total = tf.add_n(tf.unstack(tf.cast(received, wide), self.size))
        return tf.cast(total, rows.dtype)[tf.newaxis]

    def gather(self, row: tf.Tensor, coding: Coding | None = None) -> tf.Tensor:
        """All replicas' rows, in the order of their places, as one matrix."""
        if coding is not None:
            rows = coding.decode(self.launcher.gather(coding.encode(row)), self.size)
            coding.keep(lambda: rows[self.place : self.place + 1])
            return rows
        if row.dtype == tf.float32:
            return tf.ensure_shape(self.launcher.gather(row), [self.size, row.shape[1]])
        words = self.launcher.gather(compression.pack((row,), 1))
        like = tf.TensorSpec([self.size, row.shape[1]], row.dtype)
        return compression.unpack(words, (like,), self.size)[0]

    def sum_rows(
        self,
        rows: tf.Tensor,
        codings: tuple[Coding, Coding] | None = None,
        further: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Sums a matrix, of which each replica adds up one row.

        Args:
            codings: Those of rows on their way there and back, or None.
            further: Function of the sum of this replica's row, which returns what all get in its
                place.
        """
        there, back = codings or (None, None)
        row = self.scatter(rows, there)
        rows = self.gather(row if further is None else further(row), back)
        if there is not None and back is not None:
            # There is time for what nobody waits for, if it is not done, while the sum is on its
            # way.
            there.keep(last=[back.words])
        return rows

    def _exchanged(self, rows: tf.Tensor) -> tf.Tensor:
        if rows.dtype == tf.float32:
            return self.launcher.all_to_all(rows)
        words = self.launcher.all_to_all(compression.pack((rows,), self.size))
        return compression.unpack(words, (rows,), self.size)[0]


class Route:
    """Way of rows between workers: to the one whose row it is, and to all.

    With the groups of a topology, rows go in two hops, so that links between groups carry one sum
    of each group. Rows are in the order of places, which is not that of ranks: first those of the
    workers that come first in their groups, and so on. With groups (r0, r1) and (r2, r3):

                rows: of r0, r2, r1, r3       inside                         between
        r0      a0 b0 c0 d0         ->  a0+a1 b0+b1         ->  a0+a1+a2+a3
        r1      a1 b1 c1 d1         ->  c0+c1 d0+d1         ->  c0+c1+c2+c3
        r2      a2 b2 c2 d2         ->  a2+a3 b2+b3         ->  b0+b1+b2+b3
        r3      a3 b3 c3 d3         ->  c2+c3 d2+d3         ->  d0+d1+d2+d3

    Rows that are gathered go the same way back.

    Args:
        last: Hop of this worker: with groups, that between them. It alone encodes rows.
        within: Hop inside of this worker's group; None if rows go in one hop.
    """

    def __init__(self, last: Hop, within: Hop | None = None) -> None:
        self.last, self._within = last, within

    @property
    def group_size(self) -> int:
        """Number of workers in each group; 1 if rows go in one hop."""
        return 1 if self._within is None else self._within.size

    @property
    def workers(self) -> int:
        """Number of workers that have a row."""
        return self.group_size * self.last.size

    def scatter(
        self, rows: tf.Tensor, coding: Coding | None = None, sent: Sequence[tf.Tensor] = ()
    ) -> tf.Tensor:
        """Sum of this worker's row over all workers, as a matrix of one row.

        Args:
            sent: Tensors that rows wait for before they are encoded.
        """
        if self._within is not None:
            # Sums over the group of the rows of this worker's place.
            size, width = self.last.size, rows.shape[1]
            of_places = tf.reshape(rows, [self.group_size, size * width])
            rows = tf.reshape(self._within.scatter(of_places), [size, width])
        if coding is not None:
            rows = after(sent, tf.cast(rows, tf.float32))
        return self.last.scatter(rows, coding)

    def gather(
        self, row: tf.Tensor, coding: Coding | None = None, dtype: tf.DType | None = None
    ) -> tf.Tensor:
        """All workers' rows as one matrix of static shape, of the row's dtype by default."""
        dtype, width = dtype or row.dtype, row.shape[1]
        rows = self.last.gather(row if coding is None else tf.cast(row, tf.float32), coding)
        rows = tf.cast(rows, dtype)
        if self._within is None:
            return rows
        # Of those that came from other groups.
        of_places = self._within.gather(tf.reshape(rows, [1, self.last.size * width]))
        return tf.reshape(of_places, [self.workers, width])

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of one dtype over all workers, on all of them."""
        if self._within is None:
            return self.last.sum(tensors)
        cuts = [Cut.of(tensor, self.group_size) for tensor in tensors]
        all_reduce = self.last.launcher.all_reduce
        return wholes_of(self._within.sum_rows(rows_of(tensors, cuts), None, all_reduce), cuts)
