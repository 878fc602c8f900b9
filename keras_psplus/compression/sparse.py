"""A few elements of each tensor."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import flag, number, whole_number
from keras_psplus.compression.base import DType, Payload, Shape, Step
from keras_psplus.compression.cast import saturating_cast
from keras_psplus.compression.options import seed_number
from keras_psplus.compression.rows import RowCompressor, rows_and_size
from keras_psplus.native import has_gpus

# Indices of elements: in two bytes each, and what is put there.


SEGMENT = 1 << 16


def encode_indices_u16(indices: tf.Tensor, size: int) -> tuple[tf.Tensor, ...]:
    """Leaves of each index what two bytes can hold.

    Of rows that are longer, it is the index in a segment of 65,536 elements; how many indices come
    before each segment tells which one (Lin et al., 2017, send two bytes for each gap instead, but
    a gap may be longer than they can say).

    Args:
        indices: int32 or int64 tensor of shape `(rows, count)`, ascending in each row.
        size: Int: how long a row is.

    Returns:
        Tuple of an uint16 tensor of shape `(rows, count)` and, if a row is longer than a segment,
        an int32 tensor of shape `(rows, segments - 1)`.
    """
    if size <= SEGMENT:
        return (tf.cast(indices, tf.uint16),)
    low = tf.cast(tf.bitwise.bitwise_and(indices, SEGMENT - 1), tf.uint16)
    firsts = tf.range(SEGMENT, size, SEGMENT, indices.dtype)
    firsts = tf.broadcast_to(firsts, [tf.shape(indices)[0], tf.size(firsts)])
    # With int32 as the type of what comes out, there is no such kernel for GPUs.
    starts = tf.searchsorted(indices, firsts, out_type=tf.int64)
    return low, tf.ensure_shape(
        tf.cast(starts, tf.int32), [indices.shape[0], _further_segments(size)]
    )


def decode_indices_u16(low: tf.Tensor, *starts: tf.Tensor) -> tf.Tensor:
    """The inverse of `encode_indices_u16`; int64 on GPUs, and otherwise int32."""
    low = tf.cast(low, tf.int64 if has_gpus() else tf.int32)
    if not starts:
        return low
    rows, count = tf.unstack(tf.shape(low))
    of_rows = _by_search if has_gpus() else _by_ranges
    return low + of_rows(starts[0], rows, count)


def _by_ranges(starts: tf.Tensor, rows: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Segment of each index; `RaggedRange` has a kernel for CPUs only."""
    last = tf.fill([rows, 1], count)
    starts, ends = tf.concat([0 * last, starts], 1), tf.concat([starts, last], 1)
    # Ranges that rise by one from index to index, which has to be taken off them.
    first = starts + SEGMENT * tf.range(tf.shape(starts)[1])
    begin, end = (tf.reshape(each, [-1]) for each in (first, first + ends - starts))
    rising = tf.raw_ops.RaggedRange(starts=begin, limits=end, deltas=1).rt_dense_values
    return tf.reshape(rising, [rows, count]) - tf.range(count)


def _by_search(starts: tf.Tensor, rows: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The same by binary search, with kernels for GPUs; slower on processors."""
    places = tf.broadcast_to(tf.range(tf.cast(count, tf.int64)), [rows, count])
    begun = tf.searchsorted(tf.cast(starts, tf.int64), places, "right", out_type=tf.int64)
    return SEGMENT * begun


def scatter_rows(values: tf.Tensor, indices: tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
    """Makes rows of zeros, or of False, with values at their indices.

    Args:
        values: Tensor of shape `(rows, count)`, or a scalar for all indices.
        indices: int32 or int64 tensor of shape `(rows, count)`, without repetitions in a row.
        size: How long a row is: an int, or an int64 scalar.

    Returns:
        Tensor of shape `(rows * size,)`.
    """
    rows = tf.shape(indices, tf.int64)[0]
    starts = tf.range(rows)[:, tf.newaxis] * size
    # Where nothing is added up, this is many times as fast as tf.scatter_nd.
    return tf.raw_ops.SparseToDense(
        sparse_indices=tf.reshape(starts + tf.cast(indices, tf.int64), [-1]),
        output_shape=tf.reshape(rows * size, [1]),
        sparse_values=values if values.shape.rank == 0 else tf.reshape(values, [-1]),
        default_value=tf.zeros([], values.dtype),
        validate_indices=False,
    )


def index_bytes(count: int, size: int) -> int:
    """The bytes of a row with so many indices."""
    return 2 * count + 4 * _further_segments(size)


def _further_segments(size: int) -> int:
    return max(0, -(-size // SEGMENT) - 1)


# Finds the largest numbers without sorting, by operations that GPUs have.
#
# TensorFlow sorts a row on one of a GPU's multiprocessors, and has no kernel of `NthElement` there.


_BITS = 32


def find_largest(magnitudes: tf.Tensor, count: int, digit: int) -> tf.Tensor:
    """Finds the `count` largest numbers of a vector; of equal ones, the first.

    Args:
        magnitudes: float32 vector of at least `count` numbers, none of which is negative or NaN.
        digit: As for `nth_largest`.

    Returns:
        int64 vector of their indices, ascending.
    """
    bits = ordered_bits(magnitudes)
    last = nth_largest(bits, count, digit)
    chosen = tf.where(bits >= last)[:, 0]

    def first_of_equal() -> tf.Tensor:
        above, equal = (tf.where(mask)[:, 0] for mask in (bits > last, bits == last))
        mixed = tf.concat([above, equal[: count - tf.size(above)]], 0)
        marks = scatter_rows(tf.constant(True), mixed[tf.newaxis], tf.size(bits, tf.int64))
        return tf.where(marks)[:, 0]

    chosen = tf.cond(tf.size(chosen) == count, lambda: chosen, first_of_equal)
    return tf.ensure_shape(chosen, [count])


def ordered_bits(magnitudes: tf.Tensor) -> tf.Tensor:
    """Bits of float32 numbers that are not negative, as int64 numbers of the same order."""
    return tf.cast(tf.bitcast(magnitudes, tf.int32), tf.int64)


def nth_largest(numbers: tf.Tensor, n: int, digit: int) -> tf.Tensor:
    """Finds the n-th largest number, digit by digit from the first.

    Args:
        numbers: int64 vector of numbers from 0 to 2**31 - 1, at least `n` of them.
        n: How many are wanted.
        digit: Bits, 1, 2 or 4, that one pass finds: with all of these bits' values but zero each
            number is compared at once, which takes memory.

    Returns:
        int64 scalar.
    """
    places = tf.constant(1 << np.arange(_BITS - digit, -1, -digit), tf.int64)
    digits = tf.range(1, 1 << digit, dtype=tf.int64)

    def next_digit(i: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        place = tf.gather(places, i)
        as_large = numbers[:, tf.newaxis] >= found + digits * place
        counts = tf.reduce_sum(tf.cast(as_large, tf.int64), 0)
        return i + 1, found + place * tf.reduce_sum(tf.cast(counts >= n, tf.int64))

    passes = _BITS // digit
    start = tf.constant(0), tf.zeros([], tf.int64)
    result: tf.Tensor = tf.while_loop(
        lambda i, _: i < passes, next_digit, start, maximum_iterations=passes
    )[1]
    return result


# Finds the largest elements without sorting all.


# A sample of this many magnitudes finds a threshold; smaller tensors are sorted as they are.
_SAMPLE = 1 << 14
# Bits that one pass of a bisection finds: of many elements, the passes are more and smaller.
_DIGIT_OF_FEW, _DIGIT_OF_MANY = 4, 1
# Eight of them, in a byte each.
_ALL_TRUE = 0x0101010101010101


def top_k(matrix: tf.Tensor, count: int | tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Selects the `count` elements of largest magnitude per row, in index order.

    Sorting a large tensor is slow. A threshold that is estimated from a sample leaves few more than
    `count` elements; if at least `count` are left, all of the largest are among them.

    Args:
        matrix: float32 tensor of shape `(rows, size)`. What is not finite counts as the largest.

    Returns:
        float32 tensor of the elements and int32 tensor (on GPUs, int64) of their indices, ascending
        in each row, of shape `(rows, count)`.
    """
    rows, size = matrix.shape
    if rows != 1 or not isinstance(count, int) or size < 4 * _SAMPLE:
        return _by_sorting(matrix, count)
    of_all = _by_bisection if has_gpus() else _by_sorting
    if count > size // 8:
        return of_all(matrix, count)
    row = matrix[0]
    # Odd, so as not to fall in with the columns of a matrix.
    sample = _magnitudes(row[:: size // _SAMPLE | 1])
    expected = count * sample.shape[0] / size
    rank = min(sample.shape[0], math.ceil(expected + 3 * math.sqrt(expected) + 1))
    threshold = tf.math.top_k(sample, rank).values[-1]
    # NaN, which compares with nothing, is not among the small.
    candidates = _indices_of_false(tf.abs(row) <= threshold)

    def bisect_candidates() -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.gather(row, candidates)
        chosen = find_largest(_magnitudes(values), count, _DIGIT_OF_FEW)
        return tf.gather(values, chosen)[tf.newaxis], tf.gather(candidates, chosen)[tf.newaxis]

    def select_candidates() -> tuple[tf.Tensor, tf.Tensor]:
        found = tf.cast(candidates, tf.int32)
        values = tf.gather(row, found)
        left = _magnitudes(values)
        # Comparisons with the last one that is wanted leave indices in order; and to find that one
        # is less work than a sort.
        last = tf.raw_ops.NthElement(input=left, n=count - 1, reverse=True)
        chosen = tf.where(left >= last)[:, 0]
        if_equal = functools.partial(_first_of_equal, left, last, count)
        chosen = tf.cond(tf.size(chosen) == count, lambda: chosen, if_equal)
        return tf.gather(values, chosen)[tf.newaxis], tf.gather(found, chosen)[tf.newaxis]

    # See `bisection`.
    of_candidates = bisect_candidates if has_gpus() else select_candidates
    found = tf.cond(tf.size(candidates) >= count, of_candidates, lambda: of_all(matrix, count))
    return tuple(tf.reshape(part, [1, count]) for part in found)


def _first_of_equal(values: tf.Tensor, last: tf.Tensor, count: int) -> tf.Tensor:
    """Indices of `count` values above `last`, filled up with the first equal to it."""
    above, equal = values > last, values == last
    wanted = count - tf.math.count_nonzero(above, dtype=tf.int32)
    return tf.where(above | (equal & (tf.cumsum(tf.cast(equal, tf.int32)) <= wanted)))[:, 0]


def _indices_of_false(mask: tf.Tensor) -> tf.Tensor:
    """Indices of the few elements that are false.

    `tf.where` is slow for each element, true or not, so eight are tested at a time.
    """
    # Not as `tf.where(~mask)`: TensorFlow makes `x > y` of `~(x <= y)`, which NaN is not either.
    size = mask.shape[0]
    whole = size - size % 8
    same = tf.cast(mask, tf.uint8)
    words = tf.bitcast(tf.reshape(same[:whole], [whole // 8, 8]), tf.int64)
    some = tf.where(words != _ALL_TRUE)[:, 0]
    eights = tf.bitcast(tf.bitwise.bitwise_xor(tf.gather(words, some), _ALL_TRUE), tf.uint8)
    found = tf.where(eights)
    indices = tf.gather(some, found[:, 0]) * 8 + found[:, 1]
    if whole == size:
        return indices
    return tf.concat([indices, whole + tf.where(same[whole:] == 0)[:, 0]], 0)


def _by_sorting(matrix: tf.Tensor, count: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    indices = tf.math.top_k(_magnitudes(matrix), count, sorted=False).indices
    # A sort by size leaves no order of indices; to mark them is less work than another sort.
    marks = scatter_rows(tf.constant(True), indices, matrix.shape[1])
    found = tf.where(tf.reshape(marks, tf.shape(matrix)))[:, 1]
    indices = tf.reshape(found if has_gpus() else tf.cast(found, tf.int32), tf.shape(indices))
    return tf.gather(matrix, indices, batch_dims=1), indices


def _by_bisection(matrix: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    chosen = find_largest(_magnitudes(matrix[0]), count, _DIGIT_OF_MANY)
    return tf.gather(matrix[0], chosen)[tf.newaxis], chosen[tf.newaxis]


def _magnitudes(values: tf.Tensor) -> tf.Tensor:
    values = tf.abs(values)
    return tf.where(tf.math.is_finite(values), values, np.float32(np.inf))


class TopK(RowCompressor):
    """Sends the largest elements and their indices (Deep Gradient Compression).

    A float32 number and its index take six bytes, as in the paper. Numbers that are not finite
    count as the largest. Strategies send vectors, such as biases, whole.

    Args:
        density: Part of the elements that is sent, in (0, 1]; at least one element is.
        warmup_epochs: Over so many epochs, at most 10,000, the density falls exponentially to
            `density`; the shapes of the payload are unknown to the graph then.
        steps_per_epoch: Steps of such an epoch; needed with `warmup_epochs`.
        momentum_correction: Momentum that error feedback accumulates before compression. The
            optimizer should have none then. See `ErrorFeedback`.
        factor_masking: Whether that momentum is forgotten where elements were sent.
        error_feedback: Whether strategies send what was left out in later steps. Rows of
            embeddings, where that is not possible, are then sent whole.

    Example:

    >>> topk = keras_psplus.compression.TopK(0.5)
    >>> payload, _ = topk.encode(tf.constant([1.0, -3.0, 0.5, 2.0]), (), step=0)
    >>> topk.decode(payload, [4], tf.float32, step=0)
    <tf.Tensor: shape=(4,), dtype=float32, numpy=array([ 0., -3.,  0.,  2.], dtype=float32)>

    Reference: [Lin et al., 2017](https://arxiv.org/abs/1712.01887).
    """

    supports_reduce_scatter = False
    has_sum_decode = True
    compresses_vectors = False

    def __init__(
        self,
        density: float,
        warmup_epochs: int = 0,
        steps_per_epoch: int | None = None,
        momentum_correction: float = 0.0,
        factor_masking: bool = True,
        error_feedback: bool = True,
    ) -> None:
        self.density = _checked_density(density)
        self.warmup_epochs = whole_number("warmup_epochs", warmup_epochs, 0, most=10_000)
        if self.warmup_epochs:
            steps_per_epoch = whole_number("steps_per_epoch", steps_per_epoch, 1)
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = number(
            "momentum_correction", momentum_correction, "in [0, 1)", lambda m: 0 <= m < 1
        )
        self.factor_masking = flag("factor_masking", factor_masking)
        self.error_feedback = flag("error_feedback", error_feedback)
        self.compresses_rows = not self.error_feedback

    @property
    def feedback_options(self) -> dict[str, Any]:  # type: ignore[override]
        if not self.momentum_correction:
            return {}
        return {"momentum": self.momentum_correction, "factor_masking": self.factor_masking}

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        rows, size = rows_and_size(values)
        matrix = tf.reshape(values, [rows, size])
        found, indices = top_k(tf.cast(matrix, tf.float32), self._count_at(size, step))
        return tf.cast(found, values.dtype), *encode_indices_u16(indices, size)

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        values, *indices = payload
        return tf.cast(_scatter(values, decode_indices_u16(*indices), row_shape), dtype)

    def is_finite(self, residual: tf.Tensor, payload: Sequence[tf.Tensor]) -> tf.Tensor:
        # The largest are sent, and that is what is not finite.
        return tf.math.is_finite(tf.reduce_sum(tf.cast(payload[0], tf.float32)))

    def add_rows(self, payload: Payload, row_shape: Shape, step: Step) -> tf.Tensor:
        values, indices = payload[0], decode_indices_u16(*payload[1:])
        size = tf.TensorShape(row_shape).num_elements()
        if has_gpus():
            # There the order of additions to one element is not always the same.
            total = tf.add_n([_scatter(v, p, row_shape) for v, p in _rows_of(values, indices)])
        else:
            values = tf.cast(tf.reshape(values, [-1]), tf.float32)
            total = tf.math.unsorted_segment_sum(values, tf.reshape(indices, [-1]), size)
        return tf.reshape(total, row_shape)

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        size = tf.TensorShape(row_shape).num_elements()
        stage = self.warmup_epochs
        if step is not None and stage:
            assert self.steps_per_epoch is not None
            stage = min(stage, step // self.steps_per_epoch)
        count = self._counts(size)[stage]
        value_size: int = tf.as_dtype(dtype).size
        return count * value_size + index_bytes(count, size)

    def count(self, size: int) -> int:
        """Counts the elements that are sent after the warm-up.

        Args:
            size: Int: how many elements there are.

        Returns:
            An int; at least 1, if there are any.
        """
        return self._counts(size)[-1]

    def _counts(self, size: int) -> list[int]:
        """Numbers of elements sent in each epoch of the warm-up, and after it."""
        epochs = range(1, self.warmup_epochs + 2)
        return [_count(self.density ** (e / (self.warmup_epochs + 1)), size) for e in epochs]

    def _count_at(self, size: int, step: Step) -> int | tf.Tensor:
        counts = self._counts(size)
        if not self.warmup_epochs:
            return counts[0]
        stage = tf.cast(step, tf.int64) // self.steps_per_epoch
        return tf.gather(tf.constant(counts), tf.minimum(stage, self.warmup_epochs))


class RandomK(RowCompressor):
    """Sends elements at random indices, the same on all workers at a step.

    Each of `density * size` segments of equal length gives one element, drawn again at each step
    from a seed that all workers share; so only values are sent, and they can be all-reduced. If a
    number is not finite anywhere in the tensor, all that is sent is NaN.

    Args:
        density: Part of the elements that is sent, in (0, 1]; at least one element is.
        unbiased: Multiply what is sent by the length of its segment, such that the mean over steps
            is right. Not together with error feedback, with which this diverges.
        seed: Of the indices.
        error_feedback: Whether strategies send what was left out in later steps. By default,
            unless `unbiased`. Rows of embeddings, where that is not possible, are then sent whole.

    Raises:
        ValueError: If both `unbiased` and `error_feedback` are set, or an argument does not fit.

    Example:

    >>> randomk = keras_psplus.compression.RandomK(0.25)
    >>> payload, _ = randomk.encode(tf.range(8.0), (), step=0)
    >>> payload[0].shape
    TensorShape([1, 2])

    Reference: [Stich et al., 2018](https://arxiv.org/abs/1809.07599),
    [Konečný et al., 2016](https://arxiv.org/abs/1610.05492) (random masks from a seed).
    """

    reducible = True
    is_linear = True
    compresses_vectors = False

    def __init__(
        self,
        density: float,
        unbiased: bool = False,
        seed: int = 0,
        error_feedback: bool | None = None,
    ) -> None:
        self.density = _checked_density(density)
        self.unbiased = flag("unbiased", unbiased)
        self.takes_feedback = not self.unbiased
        self.seed = seed_number(seed)
        self.error_feedback = flag("error_feedback", error_feedback, default=self.takes_feedback)
        if self.error_feedback and not self.takes_feedback:
            raise ValueError(
                "`unbiased` scaling diverges with error feedback; choose one. "
                f"Received: unbiased={unbiased!r}, error_feedback={error_feedback!r}"
            )
        self.compresses_rows = not self.error_feedback

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        rows, size = rows_and_size(values)
        matrix = tf.reshape(values, [rows, size])
        indices, _ = self._indices(size, step)
        finite = tf.math.is_finite(tf.reduce_sum(tf.cast(matrix, tf.float32), 1, keepdims=True))
        nan = tf.constant(np.nan, values.dtype)
        return (tf.where(finite, tf.gather(matrix, indices, axis=1), nan),)

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        values = tf.cast(payload[0], tf.float32)
        indices, lengths = self._indices(tf.TensorShape(row_shape).num_elements(), step)
        if self.unbiased:
            values *= tf.cast(lengths, tf.float32)
        indices = tf.broadcast_to(indices, tf.shape(values))
        return saturating_cast(_scatter(values, indices, row_shape), dtype)

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        size = tf.TensorShape(row_shape).num_elements()
        value_size: int = tf.as_dtype(dtype).size
        return _count(self.density, size) * value_size

    def _indices(self, size: int, step: Step) -> tuple[tf.Tensor, tf.Tensor]:
        """One index in each segment, and the lengths of the segments."""
        count = _count(self.density, size)
        bounds = tf.range(count + 1, dtype=tf.int64) * size // max(1, count)
        lengths = bounds[1:] - bounds[:-1]
        seed = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(step, tf.int64)])
        drawn = tf.random.stateless_uniform([count], seed, alg="philox")
        offsets = tf.cast(drawn * tf.cast(lengths, tf.float32), tf.int64)
        # The product may be rounded up to the length.
        indices = bounds[:-1] + tf.minimum(offsets, lengths - 1)
        return indices, lengths


def _scatter(values: tf.Tensor, indices: tf.Tensor, row_shape: Shape) -> tf.Tensor:
    """Scatters values to their indices in rows of zeros.

    In float32, for which all devices have a kernel.
    """
    rows, _ = rows_and_size(values)
    size = tf.TensorShape(row_shape).num_elements()
    return tf.reshape(scatter_rows(tf.cast(values, tf.float32), indices, size), [rows, *row_shape])


def _rows_of(values: tf.Tensor, indices: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Each worker's values and indices, as one row."""
    return [(values[i : i + 1], indices[i : i + 1]) for i in range(values.shape[0])]


def _count(density: float, size: int) -> int:
    return min(size, max(1, int(density * size)))


def _checked_density(density: Any) -> float:
    checked: float = number("density", density, "in (0, 1]", lambda d: 0 < d <= 1)
    return checked
