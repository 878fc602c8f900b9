"""Error feedback: adds the residual of each step to the next step's tensor."""

from __future__ import annotations

import copy
import functools
from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.arguments import flag, number, shown
from keras_psplus.compression import outer_products
from keras_psplus.compression.base import Compressor, DType, Payload, Shape, Step
from keras_psplus.compression.by_variable import ByVariable
from keras_psplus.compression.cast import saturating_cast

# TensorFlow adds up this many tensors, and the residual, at once.
_MOST_ADDED = 7


class ErrorFeedback(Compressor):
    """Adds to each tensor what the steps before have left out of theirs.

    The residual is float32 and as large as the tensor, on every worker. If a tensor is not finite,
    it is passed on as such, and the state stays what it was. Rows of `tf.IndexedSlices` have no
    residual (it would need a table as large as the variable): `inner` compresses them by itself.

    Args:
        inner: `Compressor`.
        momentum: Momentum correction: what is compressed is not the gradient but a momentum of so
            much of it, accumulated on the worker, and the optimizer should have none. An optimizer
            with momentum magnifies what arrives late, and may converge badly.
        factor_masking: Whether this momentum is forgotten where something was sent, for
            compressors that send some elements only.

    Raises:
        ValueError: If `inner` is no compressor, keeps a residual already, or diverges with one.

    Example:

    >>> sign = keras_psplus.compression.ErrorFeedback(keras_psplus.compression.Sign())
    >>> gradient = tf.constant([1.0, -3.0])
    >>> payload, state = sign.encode(gradient, sign.init([2], tf.float32), step=0)
    >>> state["residual"]
    <tf.Tensor: shape=(2,), dtype=float32, numpy=array([-1., -1.], dtype=float32)>

    Reference: [Karimireddy et al., 2019](https://arxiv.org/abs/1901.09847);
    [Lin et al., 2017](https://arxiv.org/abs/1712.01887) for momentum correction and masking.
    """

    takes_feedback = False
    accepts_factored = True

    def __init__(
        self, inner: Compressor, momentum: float = 0.0, factor_masking: bool = False
    ) -> None:
        if not isinstance(inner, Compressor) or not inner.takes_feedback:
            raise ValueError(
                "`inner` must be a compressor that keeps no residual already, that does not "
                "diverge with one (as `unbiased` scaling does: `takes_feedback` is False then), "
                "and, with several for different variables, one of these. "
                f"Received: inner={shown(inner)}"
            )
        self.inner = inner
        self._times = 1
        self.momentum = number("momentum", momentum, "in [0, 1)", lambda m: 0 <= m < 1)
        self.factor_masking = flag("factor_masking", factor_masking)
        self.reducible = inner.reducible
        self.supports_reduce_scatter = inner.supports_reduce_scatter
        self.communicates = inner.communicates
        self.start_step = inner.start_step
        self.compresses_rows = inner.compresses_rows
        self.row_multiple = inner.row_multiple
        self.has_sum_decode = inner.has_sum_decode

    def init(self, shape: Shape, dtype: DType) -> dict[str, Any]:
        state = {"residual": tf.zeros(shape), "inner": self.inner.init(shape, dtype)}
        if self.momentum:
            state["momentum"] = tf.zeros(shape)
        return state

    def times(self, number: int) -> ErrorFeedback:
        """The same for tensors that are first multiplied by an int.

        Args:
            number: The int.
        """
        multiplied = copy.copy(self)
        multiplied._times = number
        return multiplied

    @property
    def is_plain(self) -> bool:
        """Whether what is compressed is the sum of tensor and residual, and nothing else."""
        return type(self) is ErrorFeedback and not self.momentum and self._times == 1

    def add(self, tensor: tf.Tensor, state: dict[str, Any]) -> tf.Tensor:
        """Adds the residual: what is to be compressed, in float32.

        Args:
            tensor: The gradient.
            state: What `init` made, with the residual.
        """
        if not self.momentum and 1 < self._times <= _MOST_ADDED:
            # In one pass over memory, where a product would be one more.
            return tf.add_n([state["residual"], *[tf.cast(tensor, tf.float32)] * self._times])
        return state["residual"] + self._velocity(tensor, state)

    def keep(
        self,
        tensor: tf.Tensor,
        total: tf.Tensor,
        payload: Sequence[tf.Tensor],
        own: tf.Tensor,
        inner_state: Any,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """Makes the state of the next step.

        Args:
            tensor: What `add` was given.
            total: What `add` returned.
            payload: What `inner` has made of it.
            own: What of it this worker has sent, as it is decoded.
            inner_state: New state of `inner`.
            state: What `add` was given.

        Returns:
            The new state; `state` itself, if anything is not finite.
        """
        residual = total - tf.cast(own, tf.float32)
        momentum = None
        if self.momentum:
            momentum = self._velocity(tensor, state)
            if self.factor_masking:
                momentum = tf.where(own != 0, 0.0, momentum)
        return self._if_finite(payload, residual, momentum, inner_state, state)

    def state_after(
        self, payload: Sequence[tf.Tensor], residual: tf.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Makes the state of the next step, without momentum, of a residual.

        Args:
            payload: What `inner`, which keeps no state, has made of the total.
            residual: What it has left of it.
            state: What `add` was given.

        Returns:
            The new state; `state` itself, if anything is not finite.
        """
        return self._if_finite(payload, residual, None, state["inner"], state)

    def encode(
        self, tensor: tf.Tensor, state: Any, step: Step
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        total = self.add(tensor, state)
        payload, inner_state = self.inner.encode(
            saturating_cast(total, tensor.dtype), state["inner"], step
        )
        own = self.inner.decode(payload, tensor.shape, tensor.dtype, step)
        return payload, self.keep(tensor, total, payload, own, inner_state, state)

    def factored(self, tensor: tf.Tensor) -> outer_products.OuterProduct | None:
        # A momentum is none, and others may add and keep something else.
        takes = type(self) is ErrorFeedback and not self.momentum
        return self.inner.factored(tensor) if takes else None

    def exchange(
        self, tensor: tf.Tensor, state: Any, step: Step
    ) -> Generator[list[tf.Tensor], list[tf.Tensor], tuple[tf.Tensor, Any, Any]]:
        product = self.factored(tensor)
        if product is None:
            total = self.add(tensor, state)
            summed = saturating_cast(total, tensor.dtype)
        else:
            total = summed = outer_products.MatrixPlusOuterProduct(
                state["residual"], product, self._times, tensor.shape
            )
        exchange = self.inner.exchange(summed, state["inner"], step)
        means: Any = None
        while True:
            try:
                payload = exchange.send(means)
            except StopIteration as stop:
                mean, own, inner_state = stop.value
                break
            means = yield payload
        if product is not None:
            state = self._if_finite(payload, total.minus(own, mean), None, inner_state, state)
            return mean, mean, state
        return mean, own, self.keep(tensor, total, payload, own, inner_state, state)

    def decode(self, payload: Payload, shape: Shape, dtype: DType, step: Step) -> tf.Tensor:
        return self.inner.decode(payload, shape, dtype, step)

    def add_to(self, total: tf.Tensor, payload: Payload, dtype: DType, step: Step) -> tf.Tensor:
        return self.inner.add_to(total, payload, dtype, step)

    def add_rows(self, payload: Payload, row_shape: Shape, step: Step) -> tf.Tensor:
        return self.inner.add_rows(payload, row_shape, step)

    def is_finite(self, residual: tf.Tensor, payload: Sequence[tf.Tensor]) -> tf.Tensor:
        return self.inner.is_finite(residual, payload)

    def wire_bytes(self, shape: Shape, dtype: DType, step: int | None = None) -> int:
        return self.inner.wire_bytes(shape, dtype, step)

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        return self.inner.encode_rows(values, step)

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        return self.inner.decode_rows(payload, row_shape, dtype, step)

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        return self.inner.row_bytes(row_shape, dtype, step)

    def for_variable(self, path: str, shape: Shape, dtype: DType) -> Compressor | None:
        inner = self.inner.for_variable(path, shape, dtype)
        return None if inner is None else ErrorFeedback(inner, self.momentum, self.factor_masking)

    def _velocity(self, tensor: tf.Tensor, state: dict[str, Any]) -> tf.Tensor:
        tensor = tf.cast(tensor, tf.float32)
        if self._times != 1:
            tensor *= self._times
        return self.momentum * state["momentum"] + tensor if self.momentum else tensor

    def _if_finite(
        self,
        payload: Sequence[tf.Tensor],
        residual: tf.Tensor,
        momentum: tf.Tensor | None,
        inner_state: Any,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """The new state; the old one if what is compressed is not finite."""
        new = {"residual": residual, "inner": inner_state}
        if momentum is not None:
            new["momentum"] = momentum
        finite = self.inner.is_finite(residual, payload)
        # With a scalar condition this op hands one of the two through; tf.where's would copy it.
        choose = functools.partial(tf.raw_ops.Select, condition=finite)
        chosen: dict[str, Any] = tf.nest.map_structure(lambda n, o: choose(x=n, y=o), new, state)
        return chosen


def with_error_feedback(compressor: Compressor | None) -> Compressor | None:
    """Wraps a compressor in `ErrorFeedback` if it asks for it by its `error_feedback`.

    Args:
        compressor: `Compressor` or None.

    Returns:
        A `Compressor`, or None.

    Example:

    >>> with_error_feedback(keras_psplus.compression.Sign()).inner
    Sign()
    """
    if isinstance(compressor, ByVariable):
        return compressor.map(with_error_feedback)
    if compressor is None or not compressor.error_feedback:
        return compressor
    return ErrorFeedback(compressor, **compressor.feedback_options)
