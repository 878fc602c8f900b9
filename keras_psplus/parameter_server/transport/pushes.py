"""Gradients sent by a worker function to the parameter servers, compressed and packed.

A gradient is encoded on the worker and decoded on its variable's server, or, shard by shard, on its
shards' servers: only the payload is sent.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from keras_psplus.compression import Compressor
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.parameter_server.state import WorkerStates, read_state
from keras_psplus.parameter_server.tracing import remote, traffic
from keras_psplus.parameter_server.tracing.worker_function import writing_states
from keras_psplus.parameter_server.transport.pulls import Compressors, current_pulls, path_of
from keras_psplus.parameter_server.transport.sharded import ShardParts


class _Piece(NamedTuple):
    """A gradient, or a shard's part of it, and what is sent for it.

    `decode` makes the gradient, of `logical` bytes, of what has arrived.
    """

    device: str
    logical: int | tf.Tensor
    sent: list[tf.Tensor]
    decode: Callable[[list[tf.Tensor]], Gradient]


class _Encoding(NamedTuple):
    """Method of encoding a gradient: compressor, name of its state, step."""

    compressor: Compressor | None
    name: str
    step: Callable[[], tf.Tensor]


# A variable, the key of its traffic, and the pieces of its gradient; None if it has none.
_Push: TypeAlias = tuple[tf.Variable, Any, list[_Piece] | None]


class Pushes:
    """Sends the gradients of a strategy's workers."""

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
        """Sends gradients to their variables' servers.

        Args:
            gradients: List of tensors, `tf.IndexedSlices` or None, on the worker.
            step: Function that returns the number of the step, an int64 scalar.
            owner: Object that residuals belong to: the optimizer.
            in_turn: Whether large ones are sent one after the other: the first are there early.

        Returns:
            List of pairs of a gradient, on its variable's server, and the variable. Those that are
            not sent at all are missing.
        """
        names = [self._name(owner, variable) for variable in variables]
        # The worker's own reading on both sides: other workers go on meanwhile.
        number = functools.cache(lambda: tf.cast(step(), tf.int64))
        gradients = [duplicate_rows.summed_for(owner, gradient) for gradient in gradients]
        pulls = current_pulls()
        has_states = compressed and any(map(self._compressors.of_gradient, variables))
        turn = pulls.turn if pulls is not None and has_states else None
        with writing_states(turn, tf.nest.flatten(gradients, expand_composites=True)):
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
        send = remote.send_in_turn if in_turn else remote.send_coalesced
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
        compressor, step = by.compressor or _AS_THEY_ARE, by.step
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


_AS_THEY_ARE = Compressor()


def _keep_alone(gradient: Gradient, key: Any) -> None:
    """Computes a gradient that is not sent, because its cost is part of each step."""
    leaves = tf.nest.flatten(gradient, expand_composites=True)
    with tf.control_dependencies(leaves):
        nothing = tf.zeros([], tf.float64)
    traffic.count(key, traffic.size_in_bytes(leaves), nothing)
