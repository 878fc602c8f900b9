"""Gradients sent by workers to the parameter servers, and summed, clipped and averaged there."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from keras_psplus.compression import Compressor
from keras_psplus.compression.methods import IDENTITY
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.keras_internals.keras_parts import ops
from keras_psplus.parameter_server import traffic, worker_function
from keras_psplus.parameter_server.pulls import (
    Compressors,
    PulledVariable,
    ShardParts,
    exact_reads_flag,
    parts_of,
    path_of,
)
from keras_psplus.parameter_server.state import WorkerStates, read_state
from keras_psplus.updates.base import map_values

# Gradients sent by a worker function, compressed and packed.
#
# A gradient is encoded on the worker and decoded on its variable's server, or, shard by shard, on
# its shards' servers: only the payload is sent.


class _Piece(NamedTuple):
    """A gradient, or a shard's part of it, `sent` so that `decode` makes it there."""

    device: str
    logical: int | tf.Tensor
    sent: list[tf.Tensor]
    decode: Callable[[list[tf.Tensor]], Gradient]


class _Encoding(NamedTuple):
    compressor: Compressor | None
    name: str
    step: Callable[[], tf.Tensor]


def over(gradient: Gradient | None, scale: tf.Tensor | None) -> Gradient | None:
    """A gradient without a loss scale, if there is one."""
    return times(gradient, None if scale is None else 1.0 / scale)


def times(gradient: Gradient | None, factor: tf.Tensor | None) -> Gradient | None:
    """A gradient times a number, if there is one."""
    if factor is None:
        return gradient
    return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)


# A variable, the key of its traffic, and the pieces of its gradient; None if it has none.
_Push: TypeAlias = tuple[tf.Variable, Any, list[_Piece] | None]


class Pushes:
    def __init__(self, compressors: Compressors, states: WorkerStates) -> None:
        self._compressors, self._states = compressors, states
        self._known = weakref.WeakKeyDictionary[keras.optimizers.Optimizer, dict[str, list[str]]]()

    def send(
        self,
        gradients: Sequence[Gradient | None],
        variables: Sequence[tf.Variable],
        step: Callable[[], tf.Tensor],
        owner: keras.optimizers.Optimizer,
        compressed: bool = True,
        in_turn: bool = False,
    ) -> list[tuple[Gradient | ShardParts | None, tf.Variable]]:
        """Sends gradients to their variables' servers; returns pairs of those and variables.

        What is not sent at all is missing. `step` returns the step's number; residuals belong to
        `owner`; with `in_turn`, large ones go one after the other, so that the first are there
        early.
        """
        names = [self._name(owner, variable) for variable in variables]
        # The worker's own reading on both sides: other workers go on meanwhile.
        number = functools.cache(lambda: tf.cast(step(), tf.int64))
        gradients = [duplicate_rows.summed_for(owner, gradient) for gradient in gradients]
        pushes = self._encode(gradients, variables, names, number, compressed)
        return self._send(pushes, in_turn)

    def _encode(
        self,
        gradients: Sequence[Gradient | None],
        variables: Sequence[tf.Variable],
        names: Sequence[str],
        number: Callable[[], tf.Tensor],
        compressed: bool,
    ) -> list[_Push]:
        pushes: list[_Push] = []
        for gradient, variable, name in zip(gradients, variables, names):
            compressor = self._compressors.of_gradient(variable) if compressed else None
            if isinstance(gradient, tf.IndexedSlices) and compressor is not None:
                compressor = compressor if compressor.compresses_rows else None
            key = (path_of(variable), "gradient", None if compressor is None else repr(compressor))
            if gradient is None:
                pushes.append((variable, key, None))
            elif compressor is not None and not compressor.communicates:
                _keep_alone(gradient, key)
            else:
                encoding = _Encoding(compressor, name, number)
                pushes.append((variable, key, self._pieces(gradient, variable, encoding)))
        return pushes

    def _name(self, owner: keras.optimizers.Optimizer, variable: tf.Variable) -> str:
        """Unique name for a variable's state, also if another has its path."""
        path = path_of(variable)
        known = self._known.setdefault(owner, {}).setdefault(path, [])
        if variable._unique_id not in known:
            known.append(variable._unique_id)
        number = known.index(variable._unique_id)
        path = f"{self._states.owner(owner)}/{path}"
        return f"{path}#{number}" if number else path

    def _send(self, pushes: list[_Push], in_turn: bool) -> list[tuple[Any, tf.Variable]]:
        pieces = [piece for _, _, parts in pushes for piece in parts or ()]
        tensors = [tensor for piece in pieces for tensor in piece.sent]
        devices = [piece.device for piece in pieces for _ in piece.sent]
        send = worker_function.send_in_turn if in_turn else worker_function.send_coalesced
        arrived = iter(send(tensors, devices))
        pairs: list[tuple[Any, tf.Variable]] = []
        for variable, key, parts in pushes:
            if parts is None:
                pairs.append((None, variable))
                continue
            decoded = []
            for piece in parts:
                traffic.count(key, piece.logical, traffic.size_in_bytes(piece.sent))
                own = [next(arrived) for _ in piece.sent]
                with tf.device(piece.device):
                    decoded.append(piece.decode(own))
            is_sharded = hasattr(variable, "shards")
            pairs.append((ShardParts(decoded) if is_sharded else decoded[0], variable))
        return pairs

    def _pieces(
        self, gradient: Gradient, variable: tf.Variable, encoding: _Encoding
    ) -> list[_Piece]:
        if hasattr(variable, "shards"):
            targets = [*zip(variable.split(gradient), variable.shards)]
        else:
            targets = [(gradient, variable)]
        return [
            self._rows(part, target, encoding)
            if isinstance(part, tf.IndexedSlices)
            else self._whole(part, target, encoding._replace(name=f"{encoding.name}/{i}"))
            for i, (part, target) in enumerate(targets)
        ]

    def _whole(self, gradient: tf.Tensor, target: tf.Variable, encoding: _Encoding) -> _Piece:
        compressor, name, step = encoding
        gradient = tf.ensure_shape(gradient, target.shape)
        shape, dtype = gradient.shape, gradient.dtype
        logical = shape.num_elements() * dtype.size
        if compressor is None:
            return _Piece(target.device, logical, [gradient], lambda sent: sent[0])
        state, write = read_state(self._states, name, lambda: compressor.init(shape, dtype))
        payload, state = compressor.encode(gradient, state, step())
        write(state)
        return _Piece(
            target.device,
            logical,
            list(payload),
            lambda sent: compressor.decode(tuple(sent), shape, dtype, step()),
        )

    def _rows(self, gradient: tf.IndexedSlices, target: tf.Variable, by: _Encoding) -> _Piece:
        compressor, step = by.compressor or IDENTITY, by.step
        values, dtype = gradient.values, gradient.values.dtype
        row_shape = target.shape[1:]
        values = tf.ensure_shape(values, tf.TensorShape([None]).concatenate(row_shape))
        payload = list(compressor.encode_rows(values, step()))

        def decode(sent: list[tf.Tensor]) -> tf.IndexedSlices:
            *payload, indices = sent
            decoded = compressor.decode_rows(tuple(payload), row_shape, dtype, step())
            return tf.IndexedSlices(
                decoded, indices, tf.constant(target.shape.as_list(), indices.dtype)
            )

        logical = traffic.size_in_bytes([values, gradient.indices])
        return _Piece(target.device, logical, [*payload, gradient.indices], decode)


def _keep_alone(gradient: Gradient, key: Any) -> None:
    """Computes a gradient that is not sent, because its cost is part of each step."""
    leaves = tf.nest.flatten(gradient, expand_composites=True)
    with tf.control_dependencies(leaves):
        nothing = tf.zeros([], tf.float64)
    traffic.count(key, traffic.size_in_bytes(leaves), nothing)


# Sums of the gradients of a global step on the variables' parameter servers.
#
# Dense gradients are added to TensorFlow's conditional accumulators, which accept gradients with
# the stamp of the present attempt at a step and drop those with an earlier one. Rows of embeddings
# wait in queues and stay separate, as an optimizer receives them in one process.


# Of the number of an attempt, of a number of gradients or workers, and of an update's arguments.
STAMP, COUNT = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int32)
UPDATE_SPECS = STAMP, COUNT, tf.TensorSpec([], tf.float32), COUNT
_take_gradient = tf.raw_ops.ResourceAccumulatorTakeGradient
_set_step = tf.raw_ops.ResourceAccumulatorSetGlobalStep


class GradientSum(NamedTuple):
    """A gradient, or a shard's part of one, that is being added up.

    `name` is that of the resource on the server of `target`. With `has_rows` it consists of
    `tf.IndexedSlices`, of which `join` makes those of the whole batch.
    """

    name: str
    target: tf.Variable
    has_rows: bool
    dtype: tf.DType
    index_dtype: tf.DType | None
    join: duplicate_rows.Join | None = None

    @property
    def wide(self) -> tf.DType:
        return tf.float64 if self.dtype == tf.float64 else tf.float32

    @property
    def _row_shape(self) -> tf.TensorShape:
        return tf.TensorShape([None]).concatenate(self.target.shape[1:])

    def _accumulator(self) -> tf.Tensor:
        return tf.raw_ops.ResourceConditionalAccumulator(
            dtype=self.wide, shape=self.target.shape, shared_name=self.name, reduction_type="SUM"
        )

    def _queue(self) -> tf.Tensor:
        types = [tf.int64, self.dtype, self.index_dtype]
        return tf.raw_ops.FIFOQueueV2(component_types=types, shared_name=self.name)

    def _dequeue(self, queue: tf.Tensor) -> list[tf.Tensor]:
        types = [tf.int64, self.dtype, self.index_dtype]
        return tf.raw_ops.QueueDequeueV2(handle=queue, component_types=types)

    def add(self, gradient: Gradient, stamp: tf.Tensor) -> None:
        with tf.device(self.target.device):
            if self.has_rows:
                tf.raw_ops.QueueEnqueueV2(
                    handle=self._queue(), components=[stamp, gradient.values, gradient.indices]
                )
            else:
                tf.raw_ops.ResourceAccumulatorApplyGradient(
                    handle=self._accumulator(),
                    local_step=stamp,
                    gradient=tf.cast(gradient, self.wide),
                )

    def take(self, stamp: tf.Tensor, count: tf.Tensor, scale: tf.Tensor) -> Gradient:
        """The sum of the gradients of an attempt, all of which have been added."""
        with tf.device(self.target.device):
            if self.has_rows:
                return self._rows(stamp, count, scale)
            handle = self._accumulator()
            total = _take_gradient(handle=handle, num_required=count, dtype=self.wide)
            with tf.control_dependencies([total]):
                _set_step(handle=handle, new_global_step=stamp + 1)
            total = tf.ensure_shape(total, self.target.shape)
            return tf.cast(total * tf.cast(scale, total.dtype), self.dtype)

    def _rows(self, stamp: tf.Tensor, count: tf.Tensor, scale: tf.Tensor) -> tf.IndexedSlices:
        queue = self._queue()

        def take_one(
            found: tf.Tensor, values: tf.Tensor, indices: tf.Tensor, counts: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            with tf.device(self.target.device):
                its_stamp, more, numbers = self._dequeue(queue)
                # Rows that a worker has sent since it was given up are not of this attempt.
                is_ours = tf.cast(tf.equal(tf.ensure_shape(its_stamp, []), stamp), tf.int32)
                rows = is_ours * tf.shape(numbers)[0]
                values = tf.concat([values, tf.ensure_shape(more, self._row_shape)[:rows]], 0)
                indices = tf.concat([indices, tf.ensure_shape(numbers, [None])[:rows]], 0)
                counts = tf.concat([counts, [rows]], 0)
            return found + is_ours, values, indices, counts

        _, values, indices, counts = tf.while_loop(
            lambda found, *_: found < count,
            take_one,
            (
                tf.constant(0),
                tf.zeros([0, *self.target.shape[1:]], self.dtype),
                tf.zeros([0], self.index_dtype),
                tf.zeros([0], tf.int32),
            ),
            shape_invariants=(
                *(tf.TensorShape([]), self._row_shape),
                *(tf.TensorShape([None]), tf.TensorShape([None])),
            ),
        )
        slices = tf.IndexedSlices(
            values * tf.cast(scale, values.dtype),
            indices,
            tf.constant(self.target.shape.as_list(), indices.dtype),
        )
        return slices if self.join is None else self.join(slices, counts)

    def release(self, stamp: tf.Tensor, count: tf.Tensor) -> None:
        """Adds zeros instead of gradients that will not come, so that nobody waits for them."""
        zeros = tf.zeros(self.target.shape, self.dtype)
        if self.has_rows:
            shape = tf.constant(self.target.shape.as_list(), self.index_dtype)
            none = tf.zeros([0], self.index_dtype)
            zeros = tf.IndexedSlices(zeros[:0], none, shape)

        def add_one(left: tf.Tensor) -> tf.Tensor:
            self.add(zeros, stamp)
            return left - 1

        with tf.device(self.target.device):
            tf.while_loop(lambda left: left > 0, add_one, [count], parallel_iterations=1)

    def discard(self, stamp: tf.Tensor) -> None:
        """Discards accumulated gradients; afterwards accepts the stamp or later ones."""
        with tf.device(self.target.device):
            if self.has_rows:
                self._empty_queue()
                return
            handle = self._accumulator()
            _set_step(handle=handle, new_global_step=stamp)
            count = tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=handle)

            def take() -> tf.Tensor:
                with tf.device(self.target.device):
                    _take_gradient(handle=handle, num_required=1, dtype=self.wide)
                    # Taking counts as a step.
                    _set_step(handle=handle, new_global_step=stamp)
                return count

            tf.cond(count > 0, take, lambda: count)

    def _empty_queue(self) -> None:
        queue = self._queue()

        def take_one(left: tf.Tensor) -> tf.Tensor:
            with tf.device(self.target.device):
                self._dequeue(queue)
            return left - 1

        size = tf.raw_ops.QueueSizeV2(handle=queue)
        tf.while_loop(lambda left: left > 0, take_one, [size])


def add(
    pairs: Sequence[tuple[Gradient | ShardParts | None, tf.Variable]],
    stamp: tf.Tensor,
    prefix: str,
    after: Callable[[tf.Variable], Sequence[tf.Operation]] = lambda target: (),
    joins: Mapping[int, duplicate_rows.Join | None] | None = None,
) -> list[Sequence[GradientSum] | None]:
    """Adds gradients that have been brought to their variables' servers.

    Returns, for each pair of a gradient and a variable, a list of one `GradientSum`, or the
    `ShardParts` of a sharded variable, or None. `after` gives the operations that a target's
    gradient is added after; `joins` has, by ids of variables, `duplicate_rows.whole_of` their
    gradients.
    """
    sums: list[Sequence[GradientSum] | None] = []
    for gradient, variable in pairs:
        if gradient is None:
            sums.append(None)
            continue
        parts = gradient if isinstance(gradient, ShardParts) else [gradient]
        targets = parts_of(variable)
        own = []
        for i, (part, target) in enumerate(zip(parts, targets, strict=True)):
            has_rows = isinstance(part, tf.IndexedSlices)
            kind = "sum"
            if has_rows:
                # A queue's types are fixed; the next batches may be looked up by other integers.
                kind = f"rows/{part.dtype.name}/{part.indices.dtype.name}"
            one = GradientSum(
                f"{prefix}/{variable._unique_id}/{i}/{kind}",
                target,
                has_rows,
                part.dtype,
                part.indices.dtype if has_rows else None,
                (joins or {}).get(id(variable)),
            )
            with tf.control_dependencies(after(target)):
                one.add(part, stamp)
            own.append(one)
        sums.append(ShardParts(own) if isinstance(gradient, ShardParts) else own)
    return sums


def take(
    sums: Sequence[Sequence[GradientSum] | None],
    stamp: tf.Tensor,
    count: tf.Tensor,
    scale: tf.Tensor,
) -> list[Gradient | ShardParts | None]:
    """The sums that `add` has returned, times `scale`: gradients on their variables' servers."""
    gradients: list[Gradient | ShardParts | None] = []
    for of_shards in sums:
        if of_shards is None:
            gradients.append(None)
            continue
        parts = [one.take(stamp, count, scale) for one in of_shards]
        gradients.append(ShardParts(parts) if isinstance(of_shards, ShardParts) else parts[0])
    return gradients


def each(sums: Iterable[Sequence[GradientSum] | None]) -> Iterator[GradientSum]:
    for of_shards in sums:
        yield from of_shards or ()


# Clipping of sums, moving averages and constraints, computed on the servers that hold them.
#
# Stock Keras computes moving averages of weights and constraints where the step runs, so that a
# worker would pull and push every weight once more for each.


_merge_call = tf.__internal__.distribute.interim.maybe_merge_call


def constrain(
    strategy: tf.distribute.Strategy,
    constraints: Sequence[tuple[keras.Variable, Callable[..., Any]]],
) -> None:
    """Has variables satisfy constraints, given as pairs, on their servers."""
    for variable, constraint in constraints:
        if isinstance(variable._value, PulledVariable):
            _run_on_server(strategy, variable, lambda v, c: v.assign(c(v)), (variable, constraint))
        else:
            # That of a sharded variable may need all of its rows.
            with exact_reads_flag.raised():
                variable.assign(constraint(variable))


def apply_and_constrain(
    strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable], apply: Callable[[], Any]
) -> None:
    constraints = [(v, v.constraint) for v in variables if v.constraint is not None]
    for variable, _ in constraints:
        variable.constraint = None
    try:
        apply()
    finally:
        for variable, constraint in constraints:
            variable.constraint = constraint
    constrain(strategy, constraints)


def average(
    strategy: tf.distribute.Strategy,
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
) -> None:
    not_first_step = ops.not_equal(optimizer.iterations, 0)
    for variable, average in zip(variables, optimizer._model_variables_moving_average):
        if average is not None:
            momentum = ops.cast(not_first_step, variable.dtype) * optimizer.ema_momentum
            _run_on_server(strategy, variable, _average, (variable, average, momentum))


def _average(variable: keras.Variable, average: keras.Variable, momentum: float) -> None:
    # TensorFlow's variables: of a sharded one these are the shards that are updated now.
    value = momentum * average._value.value() + (1 - momentum) * variable._value.value()
    average._value.assign(value)


def _run_on_server(
    strategy: tf.distribute.Strategy,
    variable: keras.Variable,
    update: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    def merged(distribution: tf.distribute.Strategy) -> None:
        distribution.extended.update(variable._value, lambda _: update(*args), group=False)

    _merge_call(merged, strategy)


def clip(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[tf.Tensor | tf.IndexedSlices | ShardParts | None],
) -> list[tf.Tensor | tf.IndexedSlices | ShardParts | None]:
    """Clips the sums of a global step on their servers: elsewhere, each crosses twice more."""
    by_norm = optimizer.clipnorm and optimizer.clipnorm > 0
    if not by_norm and optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        norm, limit = _norm(grads), optimizer.global_clipnorm
        # As in Keras: NaN if the norm is not finite.
        factor = limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [_times(gradient, factor) for gradient in grads]
    return [
        _times(gradient, optimizer.clipnorm / ops.maximum(_norm([gradient]), optimizer.clipnorm))
        if by_norm and isinstance(gradient, ShardParts)
        else _at(lambda g: optimizer._clip_gradients([g])[0], gradient)
        for gradient in grads
    ]


def _norm(gradients: Iterable[Any]) -> tf.Tensor:
    squares = []
    for gradient in gradients:
        for part in gradient if isinstance(gradient, ShardParts) else [gradient]:
            if part is not None:
                with tf.device(part.device):
                    squares.append(ops.cast(ops.sum(ops.square(part)), "float32"))
    return ops.sqrt(ops.sum(ops.stack(squares)))


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    return _at(lambda g: g * ops.cast(factor, g.dtype), gradient)


def _at(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to a gradient, or each of its parts, on its server."""
    if gradient is None:
        return None
    if isinstance(gradient, ShardParts):
        return ShardParts(_at(function, part) for part in gradient)
    with tf.device(gradient.device):
        return function(gradient)
