"""Base class of compressors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from keras_psplus.compression.averaging import exchange_means

if TYPE_CHECKING:
    from keras_psplus.compression.outer_products import OuterProduct


Payload: TypeAlias = tuple[tf.Tensor, ...]
Shape: TypeAlias = tf.TensorShape | Sequence[int]
DType: TypeAlias = tf.DType | str
Step: TypeAlias = tf.Tensor | int


class Compressor:
    """Base class of compressors: pure functions of a tensor, a state and the step.

    A compressor owns nothing but its options. The state that it keeps from step to step is made by
    `init` and handed from call to call by a strategy, which stores it, for each variable and each
    worker, and saves it. All methods but `init` and `wire_bytes` are called inside a `tf.function`.

    A compressor of your own needs `encode`, `decode` and `wire_bytes`. Non-finite numbers must
    come out of `decode` as non-finite ones (it need not be the same ones, or only those), so that
    an optimizer that checks for them finds them.

    Attributes:
        error_feedback: Whether strategies wrap it in `ErrorFeedback`: it loses something that the
            next steps have to make up for.
        feedback_options: Further arguments of that `ErrorFeedback`.
        takes_feedback: Whether it can be wrapped so: not if what comes out of `decode` may be
            further from the tensor than zeros are, with which residuals would grow for ever.
        reducible: Whether the mean of payloads is the payload of the mean, so that workers can
            all-reduce payloads as they are. If so, `mean` serves.
        is_linear: True if `encode` is also stateless and linear in scale, so payloads can be
            summed directly.
        supports_reduce_scatter: Whether pieces of a tensor, as rows of `encode_rows`, are encoded
            as well as the whole, so that a sum over workers may be shared out among them.
        communicates: Whether anything is sent at all. If not, each worker uses its own gradient.
        start_step: Before this step tensors are sent whole.
        compresses_rows: Whether strategies compress the rows of `tf.IndexedSlices`, which have no
            residual, as well. If not, rows are sent whole.
        row_multiple: Rows of `encode_rows` are best of a multiple of so many elements.
        has_sum_decode: Whether there is an `add_rows`, which decodes and sums the payloads of all
            workers at once.
        compresses_vectors: Whether strategies compress gradients of vectors, such as biases. If
            not, these are sent whole: they are small, and models mind what is left out of them.
        accepts_factored: Whether a gradient that `factored` finds to be a product need not be made.
        gathers_factors: Whether of such a gradient the factors are sent. All replicas gather them
            and multiply, unless one has more rows than `most_rows`. It has `most_rows`,
            `factor_bytes` and `inner` as `SufficientFactors` has them. Of other gradients, `inner`
            takes care.
        supports_values: Whether what comes out of `decode` is near to the tensor in each of its
            elements and at every step, so that values of variables can be read through it, too.

    Example:

    ```python
    class Half(keras_psplus.compression.Compressor):
        reducible = True

        def encode(self, tensor, state, step):
            return (tf.cast(tensor, tf.float16),), state

        def decode(self, payload, shape, dtype, step):
            return tf.reshape(tf.cast(payload[0], dtype), shape)

        def wire_bytes(self, shape, dtype, step=None):
            return 2 * tf.TensorShape(shape).num_elements()
    ```
    """

    error_feedback = False
    feedback_options: dict[str, Any] = {}
    takes_feedback = True
    reducible = False
    is_linear = False
    supports_reduce_scatter = False
    communicates = True
    start_step = 0
    compresses_rows = True
    compresses_vectors = True
    row_multiple = 1
    has_sum_decode = False
    accepts_factored = False
    gathers_factors = False
    supports_values = False

    def init(self, shape: Shape, dtype: DType) -> Any:
        """Makes the state before the first step.

        Args:
            shape: Static shape of the tensor.
            dtype: Its dtype.

        Returns:
            Nested structure of tensors, the same on every worker; `()` for none.
        """
        return ()

    def encode(
        self, tensor: tf.Tensor, state: Any, step: Step
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        """Compresses a tensor.

        Args:
            tensor: Floating tensor of static shape.
            state: What `init` or the last step returned.
            step: int64 scalar, the same on all workers.

        Returns:
            The payload, a tuple of tensors, and the new state. The shapes of the payload are
            static, unless the compressor changes its rate from step to step.
        """
        raise NotImplementedError

    def decode(self, payload: Payload, shape: Shape, dtype: DType, step: Step) -> tf.Tensor:
        """Turns a payload back into a tensor.

        Args:
            payload: What `encode` returned, perhaps on another worker.
            shape: Static shape of the tensor.
            dtype: Its dtype.
            step: The step at which it was encoded.

        Returns:
            Tensor of this shape and dtype.
        """
        raise NotImplementedError

    def is_finite(self, residual: tf.Tensor, payload: Sequence[tf.Tensor]) -> tf.Tensor:
        """True if the whole tensor was finite.

        A payload that shows it saves a pass over the residual.

        Args:
            residual: What was left out of the tensor. Not finite, if the tensor was not.
            payload: What `encode` made of the tensor, or what `exchange` has yielded last.

        Returns:
            Scalar bool tensor.
        """
        return tf.math.is_finite(tf.reduce_sum(residual))

    def add_to(self, total: tf.Tensor, payload: Payload, dtype: DType, step: Step) -> tf.Tensor:
        """Adds a decoded payload to a float32 tensor.

        Args:
            total: The float32 tensor.
            payload: What `encode` returned, of a tensor of the same shape.
            dtype: Type of that tensor.
            step: int64 scalar.

        Returns:
            The sum, a float32 tensor.
        """
        return total + tf.cast(self.decode(payload, total.shape, dtype, step), tf.float32)

    def add_rows(self, payload: Payload, row_shape: Shape, step: Step) -> tf.Tensor:
        """Sums decoded payloads; only called if `has_sum_decode`.

        Args:
            payload: Those of `encode` of all workers, joined in rank order along axis 0, of which
                each has one row.
            row_shape: Static shape of the tensor.
            step: The step at which they were encoded.

        Returns:
            float32 tensor of this shape.
        """
        raise NotImplementedError

    def wire_bytes(self, shape: Shape, dtype: DType, step: int | None = None) -> int:
        """Counts the bytes of a payload.

        Args:
            shape: Static shape of the tensor.
            dtype: Its dtype.
            step: Python int, for compressors whose rate changes; None for after the last change.

        Returns:
            Python int.
        """
        raise NotImplementedError

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        """Compresses each row by itself, as the values of `tf.IndexedSlices` need it.

        Rows have no state. A compressor that can do nothing for rows sends them whole, as this
        method does.

        Args:
            values: Tensor of shape `(rows, ...)`; the number of rows may be unknown.
            step: int64 scalar.

        Returns:
            Tuple of tensors with the rows on axis 0.
        """
        return (values,)

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        """Turns the payload of `encode_rows` back into values.

        Args:
            payload: What `encode_rows` returned.
            row_shape: Shape of one row.
            dtype: Type of the values.
            step: int64 scalar.

        Returns:
            Tensor of shape `(rows, *row_shape)`.
        """
        return tf.cast(payload[0], dtype)

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        """Counts the bytes that `encode_rows` makes of one row.

        Args:
            row_shape: Shape of one row.
            dtype: Type of the values.
            step: The step, of compressors that change with it; None for those after a warm-up.

        Returns:
            Python int.
        """
        size: int = tf.TensorShape(row_shape).num_elements() * tf.as_dtype(dtype).size
        return size

    def factored(self, tensor: tf.Tensor) -> OuterProduct | None:
        """Finds of which product a tensor need not be made.

        Args:
            tensor: Tensor of static shape.

        Returns:
            `outer_products.OuterProduct`, or None. If it is not None, `ErrorFeedback` calls
            `exchange` with an `outer_products.MatrixPlusOuterProduct` instead of a tensor, and is
            to subtract an `OuterProduct`.
        """
        return None

    def exchange(
        self, tensor: tf.Tensor, state: Any, step: Step
    ) -> Generator[list[tf.Tensor], list[tf.Tensor], tuple[tf.Tensor, Any, Any]]:
        """Averages over workers, as a generator that leaves the collectives to its caller.

        It yields a list of tensors and is sent the list of their means over the workers, as often
        as the method needs. Strategies run the generators of many variables side by side and put
        what they yield into one collective (`exchange_means`). It does not look at `start_step`.

        Args:
            tensor: Floating tensor of static shape.
            state: What `init` or the last step returned.
            step: int64 scalar.

        Returns:
            The mean, what error feedback has to subtract for this worker, and the new state.
        """
        payload, state = self.encode(tensor, state, step)
        means = yield list(payload)
        mean = self.decode(tuple(means), tensor.shape, tensor.dtype, step)
        return mean, self.decode(payload, tensor.shape, tensor.dtype, step), state

    def mean(
        self,
        tensor: tf.Tensor,
        state: Any,
        step: Step,
        all_mean: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]],
    ) -> tuple[tf.Tensor, Any, Any]:
        """Averages one tensor over workers.

        Args:
            tensor: Floating tensor of static shape.
            state: What `init` or the last step returned.
            step: int64 scalar.
            all_mean: Function from a list of tensors to the list of their means over workers.

        Returns:
            The mean, what error feedback has to subtract for this worker, and the new state.
        """
        means, owns, states = exchange_means([self], [tensor], [state], step, all_mean)
        return means[0], owns[0], states[0]

    def for_variable(self, path: str, shape: Shape, dtype: DType) -> Compressor | None:
        """Chooses the compressor of a variable's gradient.

        Args:
            path: The variable's path, such as `"sequential/dense/kernel"`.
            shape: Its static shape.
            dtype: Its dtype.

        Returns:
            A `Compressor`, or None to send the gradient as it is.
        """
        if tf.TensorShape(shape).rank < 2 and not self.compresses_vectors:
            return None
        return self if tf.as_dtype(dtype).is_floating else None

    def __repr__(self) -> str:
        options = [
            f"{name}={getattr(self, name)!r}"
            for name, parameter in inspect.signature(type(self)).parameters.items()
            if hasattr(self, name) and getattr(self, name) != parameter.default
        ]
        return f"{type(self).__name__}({', '.join(options)})"
