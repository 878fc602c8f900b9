"""Reads of parameter servers' variables, whole or by rows, exact or compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import ByVariable, Compressor, methods
from keras_psplus.core.batch.replica_step import Key
from keras_psplus.parameter_server.tracing import remote, traffic, worker_function
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import record, resource_variable_ops

# Compressors of variables' gradients and of their values.


_FOR_VALUES = (
    'None, "bf16", "fp16", "int8", `Cast`, `Int8`, a `ByVariable` or dict of these, or a '
    "compressor of your own with `supports_values = True`"
)


class Compressors:
    """The compressors of one strategy, from `compression` and `pull_compression`.

    Raises:
        ValueError: If one of them is unknown, or cannot do what it is asked for.
    """

    def __init__(
        self,
        push: Compressor | str | dict[Any, Any] | None,
        pull: Compressor | str | dict[Any, Any] | None,
    ) -> None:
        push = compression.get(push)
        for compressor in methods.each(push):
            _check_that_it_encodes("compression", compressor)
        self._push = compression.with_error_feedback(push)
        pull = compression.get(pull, "pull_compression", _FOR_VALUES)
        for compressor in methods.each(pull):
            _check_that_it_encodes("pull_compression", compressor)
            _check_that_it_serves_values(compressor)
        if pull is not None and not isinstance(pull, ByVariable):
            # Small variables cost their message, not their bytes, and vectors are those that
            # suffer: biases, and the scales and shifts of normalisations.
            pull = ByVariable({}, default=pull)
        self._pull = pull

    def of_gradient(self, variable: tf.Variable) -> Compressor | None:
        """The compressor of a variable's gradient, with error feedback if it needs it, or None."""
        return _chosen(self._push, variable)

    def of_value(self, variable: tf.Variable) -> Compressor | None:
        """The compressor that a worker reads a variable through, or None.

        Only what was made to be trained is read so. Other variables are optimizers' own, or, as
        the averages of BatchNormalization, read in order to be written again with a small change,
        which rounding would swallow.
        """
        if self._pull is None or not variable.trainable:
            return None
        compressor = _chosen(self._pull, variable)
        if compressor is not None:
            # It may be one that `for_variable` has made just now.
            _check_that_it_serves_values(compressor)
        return compressor


def path_of(variable: tf.Variable) -> str:
    """A variable's path as Keras has it, such as `"sequential/dense/kernel"`."""
    return getattr(variable, "keras_path", None) or variable.name.split(":")[0]


def _chosen(compressor: Compressor | None, variable: tf.Variable) -> Compressor | None:
    if compressor is None or not variable.dtype.is_floating:
        return None
    return compressor.for_variable(path_of(variable), variable.shape, variable.dtype)


def _check_that_it_encodes(argument: str, compressor: Compressor) -> None:
    method = methods.missing(compressor, "encode", "decode")
    if method:
        raise ValueError(
            f"`{argument}` must have `encode` and `decode`: on the way between a worker and a "
            "parameter server there are no rounds in which workers average. "
            f"Received: {argument}={compressor!r}, without `{method}`"
        )


def _check_that_it_serves_values(compressor: Compressor) -> None:
    if not compressor.supports_values:
        raise ValueError(
            "`pull_compression` must keep every element of a variable nearly as it is, at every "
            f"read: {_FOR_VALUES}. Signs, some of the elements and low ranks are for gradients, "
            "whose sum over steps counts (`compression`). "
            f"Received: pull_compression={compressor!r}"
        )


# Reads belong to no step of an optimizer; evaluation has none.
_STEP = 0


def parts_of(variable: tf.Variable) -> list[tf.Variable]:
    """The shards of a variable, or itself."""
    return getattr(variable, "shards", [variable])


def raw_read(variable: tf.Variable) -> tf.Tensor:
    """Reads a whole variable, unknown to the tape."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    value.set_shape(variable.shape)
    return value


def read(
    parts: Sequence[tf.Variable],
    compressor: Compressor | None,
    key: Key,
    in_turn: Callable[[tf.Variable], AbstractContextManager[Any]],
) -> tf.Tensor:
    """Brings a variable's value to the worker; `in_turn` makes the context of reading a part."""
    values = []
    for part in parts:
        with in_turn(part):
            payload = _encode(part, compressor, key)
        values.append(_decode(payload, part, compressor))
    return values[0] if len(parts) == 1 else tf.concat(values, 0)


def groups(variables: Sequence[tf.Variable]) -> list[list[int]]:
    """Places of the variables that `read_together` brings: small ones of a server, others alone."""
    found: dict[str | int, list[int]] = {}
    for place, variable in enumerate(variables):
        is_small = traffic.size_in_bytes([variable]) <= remote.SMALL_BYTES
        found.setdefault(variable.device if is_small else place, []).append(place)
    return list(found.values())


def read_together(
    variables: Sequence[tf.Variable],
    compressors: Sequence[Compressor | None],
    keys: Sequence[Key],
) -> list[tf.Tensor]:
    """Reads whole variables or shards of one server, small ones in one message."""
    payloads = [_encode(*one) for one in zip(variables, compressors, keys)]
    tensors = [tensor for payload in payloads for tensor in payload]
    with ops.device(variables[0].device):
        arrived = iter(remote.send_coalesced(tensors, [None] * len(tensors)))
    own = [[next(arrived) for _ in payload] for payload in payloads]
    return [_decode(*one) for one in zip(own, variables, compressors)]


def gather(
    variable: tf.Variable, rows: tf.Tensor, compressor: Compressor | None, key: Key
) -> tf.Tensor:
    """Brings rows of a whole variable, or of a shard, to the worker."""
    row_shape, dtype = variable.shape[1:], variable.dtype
    values = tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=rows, dtype=dtype, validate_indices=True
    )
    row_bytes = compressed = row_shape.num_elements() * dtype.size
    if compressor is not None:
        with ops.device(variable.device):
            payload = compressor.encode_rows(values, _STEP)
        compressed = compressor.row_bytes(row_shape, dtype)
        values = compressor.decode_rows(payload, row_shape, dtype, _STEP)
    # With what is asked for.
    count, asked = tf.size(rows, tf.int64), rows.dtype.size
    if worker_function.handle_of(variable) is None:
        traffic.count(key, count * (row_bytes + asked), count * (compressed + asked))
    return values


def key_of(variable: tf.Variable, compressor: Compressor | None) -> Key:
    """Key under which a traffic counter counts the reads of a variable."""
    return path_of(variable), "pull", None if compressor is None else repr(compressor)


def _encode(variable: tf.Variable, compressor: Compressor | None, key: Any) -> tuple[Any, ...]:
    with ops.device(variable.device):
        value = raw_read(variable)
        payload = (value,)
        if compressor is not None:
            state = compressor.init(value.shape, value.dtype)
            if tf.nest.flatten(state):
                raise ValueError(
                    "`pull_compression` cannot keep a state: a server serves all workers alike. "
                    f"Received: pull_compression={compressor!r}, whose `init` returned {state!r}"
                )
            payload, _ = compressor.encode(value, state, _STEP)
    if worker_function.handle_of(variable) is None:
        traffic.count(
            key, traffic.size_in_bytes([value]), traffic.size_in_bytes(payload), payload[0]
        )
    return payload


def _decode(
    payload: Sequence[tf.Tensor], variable: tf.Variable, compressor: Compressor | None
) -> tf.Tensor:
    if compressor is None:
        return payload[0]
    return compressor.decode(tuple(payload), variable.shape, variable.dtype, _STEP)


def lookup(
    variable: tf.Variable,
    shape: tf.TensorShape,
    indices: Any,
    read_rows: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Gathers rows of a variable; each distinct row is read once.

    Args:
        variable: The variable, as the tape knows it.
        shape: Shape of its whole value.
        indices: Integer tensor of row numbers.
        read_rows: Function that brings the rows of a vector of distinct row numbers.
    """
    resource_variable_ops.variable_accessed(variable)
    indices = tf.convert_to_tensor(indices)
    row_shape = shape[1:]
    with record.stop_recording():
        unique, positions = tf.unique(tf.reshape(indices, [-1]))
        rows = tf.gather(read_rows(unique), positions)
        rows = tf.reshape(rows, tf.concat([tf.shape(indices), row_shape.as_list()], 0))
        rows.set_shape(indices.shape.concatenate(row_shape))

    def backward(gradient: tf.Tensor) -> list[tf.IndexedSlices]:
        # Repeated rows stay apart, as Keras's optimizers get them in one process; see
        # `duplicate_rows`, which may sum them before they are sent.
        values = tf.reshape(gradient, [-1, *row_shape.as_list()])
        whole = tf.constant(shape.as_list(), tf.int64)
        return [tf.IndexedSlices(values, tf.reshape(indices, [-1]), whole)]

    record.record_operation(
        "ResourceGather",
        [rows],
        [variable.handle],
        backward_function=backward,
        forward_function=None,
    )
    return rows
