"""A user's Keras optimizer, applied to some rows of a table.

The optimizer sees variables that have the table's shape, but whose value is that of the rows that
a step has touched: what it computes element by element is then right for these rows, and the
others stay as they are, momenta and all ("lazily", as TensorFlow's sparse kernels do).
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.tables.chunks import ChunkedRows

_UNSUPPORTED = {
    "use_ema": "leave it out",
    "gradient_accumulation_steps": "have HybridStrategy accumulate "
    "(`updates=psp.updates.Accumulate(n)`)",
}
_CHECK_ROWS, _CHECK_DIM = 3, 4
# Constraints may let small values be, or large ones.
_CHECK_SCALES = tuple(10.0**i for i in range(-6, 7, 2))


class RowVariable:
    """A variable whose value is that of some of its rows, between `begin` and `commit`.

    Args:
        variable: `tf.Variable` of shape `(rows, dim)`, or `ChunkedRows`.
    """

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self._ids: tf.Tensor = None
        self.value: tf.Tensor = None

    @property
    def dtype(self) -> tf.DType:
        return self._variable.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self._variable.shape

    @property
    def name(self) -> str:
        return self._variable.name

    @property
    def _unique_id(self) -> str:
        return self._variable._unique_id

    def begin(self, ids: tf.Tensor) -> None:
        """Reads the rows of a vector of distinct ids."""
        self._ids, self.value = ids, self._variable.sparse_read(ids)

    def commit(self) -> tf.Operation | tf.Tensor:
        if isinstance(self._variable, ChunkedRows):
            return self._variable.write(self._ids, self.value)
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self._variable.handle, indices=self._ids, updates=self.value
        )

    def assign(self, value: tf.Tensor) -> None:
        self.value = tf.cast(value, self.dtype)

    def assign_add(self, value: tf.Tensor) -> None:
        self.assign(self.value + tf.cast(value, self.dtype))

    def assign_sub(self, value: tf.Tensor) -> None:
        self.assign(self.value - tf.cast(value, self.dtype))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self.value if dtype is None else tf.cast(self.value, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)


for _operator in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:

    def _overload(name: str = _operator) -> None:
        of_tensor = getattr(tf.Tensor, name)

        def of_rows(self: RowVariable, *args: Any, **kwargs: Any) -> Any:
            return of_tensor(self.value, *args, **kwargs)

        setattr(RowVariable, name, of_rows)

    _overload()


class RowOptimizer:
    """Applies gradients of rows to one table.

    Args:
        config: What `config_of` has made of the user's optimizer.
        weights: `tf.Variable` of the table, of shape `(rows, dim)`, or `ChunkedRows`.
        make_slot: Function of an initializer and a shape that makes a slot; by default a variable
            of that value.
    """

    def __init__(
        self,
        config: dict[str, Any],
        weights: Any,
        make_slot: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._optimizer = keras.optimizers.deserialize(config["optimizer"])
        self._weight_decay = config["weight_decay"]
        self._clipvalue = config["clipvalue"]
        self._constraint = keras.constraints.get(config["constraint"])
        penalty = gradient_of(keras.regularizers.get(config["regularizer"]))
        # Rows of keys are known, and perhaps made, behind all clipping alone.
        is_late = isinstance(weights, ChunkedRows)
        self._penalty: Any = None if is_late else penalty
        self._late_penalty: Any = penalty if is_late else None
        self._weights = RowVariable(weights)
        self._slots: list[RowVariable] = []
        optimizer = self._optimizer

        def add_slot(
            reference_variable: RowVariable, name: str | None = None, initializer: Any = "zeros"
        ) -> RowVariable:
            initializer = keras.initializers.get(initializer)
            slot = RowVariable((make_slot or _whole_slot)(initializer, reference_variable.shape))
            self._slots.append(slot)
            return slot

        # Keras would make a variable of its own kind.
        object.__setattr__(optimizer, "add_variable_from_reference", add_slot)
        optimizer.build([self._weights])
        self._scalars = scalars_of(optimizer)

    @property
    def slots(self) -> list[Any]:
        """The optimizer's variables of the table's shape, in their order and of its kind."""
        return [slot._variable for slot in self._slots]

    @property
    def scalars(self) -> int:
        """Number of scalars that `apply` needs beside the learning rate."""
        return len(self._scalars)

    def regularized(self, ids: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient of rows with that of the table's regularizer on them."""
        if self._penalty is None:
            return gradient
        return gradient + self._penalty(self._weights._variable.sparse_read(ids))

    def apply(
        self,
        ids: tf.Tensor,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        scalars: tf.Tensor,
        iterations: tf.Tensor,
        rounded: Callable[[int, tf.Tensor], tf.Tensor] | None = None,
    ) -> tf.Operation:
        """Updates rows.

        Args:
            ids: int32 vector of distinct row numbers.
            gradient: float32 tensor of shape `(len(ids), dim)`.
            learning_rate: float32 scalar.
            scalars: float32 vector, the values of `scalars_of` the worker's optimizer.
            iterations: int64 scalar: updates before this one.
            rounded: Function of a column's number, 0 for rows and then that of each slot, and of
                its new values, that returns what is written.

        Returns:
            The operation that has written all rows.
        """
        views = [self._weights, *self._slots]
        self._optimizer._iterations.assign(tf.cast(iterations, self._optimizer._iterations.dtype))
        for i, scalar in enumerate(self._scalars):
            scalar.assign(tf.cast(scalars[i], scalar.dtype))
        for view in views:
            view.begin(ids)
        if self._clipvalue:
            gradient = tf.clip_by_value(gradient, -self._clipvalue, self._clipvalue)
        if self._late_penalty is not None:
            gradient += self._late_penalty(self._weights.value)
        if self._weight_decay:
            decay = tf.cast(self._weight_decay, tf.float32) * learning_rate
            self._weights.assign_sub(self._weights.value * decay)
        self._optimizer.update_step(gradient, self._weights, learning_rate)
        if self._constraint is not None:
            self._weights.assign(self._constraint(self._weights.value))
        if rounded is not None:
            for i, view in enumerate(views):
                view.value = rounded(i, view.value)
        return tf.group(*(view.commit() for view in views))


class OptimizerTurns:
    """Optimizers that a table has one after the other.

    A step that was traced with an earlier one knows slots that later rows lack.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        with tf.init_scope():
            self._number = tf.Variable(0, dtype=tf.int32, trainable=False)

    def next(self) -> int:
        """Begins the turn of another one; returns its number."""
        return int(self._number.assign_add(1))

    def checked(self, number: int, keys: tf.Tensor) -> tf.Tensor:
        """The keys of an update, which fails unless it is that optimizer's turn."""
        text = (
            f"The table '{self._name}' is updated by another optimizer by now, and has one at a "
            "time. Compile the model again before it trains on. Received: an update by an earlier "
            "optimizer"
        )
        is_now = tf.debugging.assert_equal(self._number.read_value(), number, text)
        with tf.control_dependencies([is_now]):
            return tf.identity(keys)


def _whole_slot(initializer: Any, shape: Any) -> tf.Variable:
    return tf.Variable(initializer(shape, dtype="float32"), trainable=False)


def scalars_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Scalar variables that an optimizer updates each step, such as Nadam's product."""
    own = {id(optimizer._iterations), id(getattr(optimizer, "_learning_rate", None))}
    return [v for v in optimizer.variables if tuple(v.shape) == () and id(v) not in own]


def weight_decay_of(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> float | None:
    # Patterns are matched with the name that TensorFlow has for it, as in Keras's own updates.
    decays = optimizer.weight_decay and optimizer._use_weight_decay(variable._value)
    return optimizer.weight_decay if decays else None


def config_of(
    optimizer: keras.optimizers.Optimizer,
    weight_decay: float | None,
    constraint: keras.constraints.Constraint | None,
    regularizer: keras.regularizers.Regularizer | None,
) -> dict[str, Any]:
    """Configuration of a user's optimizer for parameter servers, ready for JSON."""
    for option, fix in _UNSUPPORTED.items():
        if getattr(optimizer, option):
            raise ValueError(
                f"`{option}` is not supported for rows of a DynamicEmbedding, and of tables on "
                f"parameter servers: {fix}, or keep a table of numbered rows on the workers "
                '(`placement="mirrored"`). '
                f"Received: {option}={getattr(optimizer, option)} of the optimizer "
                f"'{optimizer.name}'"
            )
    config = keras.optimizers.serialize(optimizer)
    # The worker sends the rate with each update, and sees to clipping by norms.
    config["config"].update(
        learning_rate=0.0,
        clipnorm=None,
        clipvalue=None,
        global_clipnorm=None,
        loss_scale_factor=None,
    )
    by_norm = optimizer.clipnorm or optimizer.global_clipnorm
    return {
        "optimizer": config,
        "weight_decay": weight_decay,
        "clipvalue": None if by_norm else optimizer.clipvalue,
        "constraint": keras.constraints.serialize(constraint) if constraint else None,
        "regularizer": keras.regularizers.serialize(regularizer) if regularizer else None,
    }


def check_elementwise(config: dict[str, Any], dim: int = _CHECK_DIM) -> None:
    """Checks that an optimizer, and a table's constraint, compute each row by itself.

    Args:
        dim: Numbers in a row, of which a constraint may have its own for each.
    """
    check_constraint(
        config["constraint"], dim, ', or keep the table on the workers (`placement="mirrored"`)'
    )
    random = np.random.RandomState(0)
    start = random.standard_normal((_CHECK_ROWS, _CHECK_DIM)).astype(np.float32)
    gradient = random.standard_normal((_CHECK_ROWS, _CHECK_DIM)).astype(np.float32)
    results = []
    try:
        for groups in ([[0, 1, 2]], [[0], [1], [2]]):
            weights = tf.Variable(start)
            rows = RowOptimizer({**config, "constraint": None}, weights)
            for step in range(2):
                for ids in groups:
                    rows.apply(
                        tf.constant(ids),
                        tf.constant(gradient[ids]),
                        tf.constant(0.1),
                        tf.ones([rows.scalars]) / 2,
                        tf.constant(step, tf.int64),
                    )
            results.append(weights.numpy())
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise ValueError(_refusal(config, why)) from error
    at_once, one_by_one = results
    if not np.allclose(at_once, one_by_one, rtol=1e-4, atol=1e-6):
        raise ValueError(_refusal(config, "a step on all rows at once differs from one by one"))


def gradient_of(regularizer: Any) -> Any:
    """Function from rows to the gradient of a regularizer's penalty; None without one."""
    if regularizer is None:
        return None
    # Not by a tape: those of a function that is traced in `tf.init_scope` record nothing.
    return tf.function(
        lambda rows: tf.gradients(regularizer(rows), rows)[0],
        input_signature=[tf.TensorSpec([None, None])],
        autograph=False,
    )


def check_regularizer(regularizer: Any) -> None:
    """Raises ValueError if a regularizer does not take each row by itself."""
    gradient = gradient_of(regularizer)
    if gradient is None:
        return
    rows, why = np.random.RandomState(0).standard_normal((_CHECK_ROWS, _CHECK_DIM)), ""
    try:
        at_once = gradient(tf.constant(rows, tf.float32))
        one_by_one = [gradient(tf.constant(row[np.newaxis], tf.float32)) for row in rows]
        if np.allclose(at_once, np.concatenate(one_by_one), rtol=1e-4, atol=1e-6):
            return
    except Exception as error:
        why = f" ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    raise ValueError(
        "`embeddings_regularizer` takes each row by itself, as L1, L2 and L1L2 of Keras do: each "
        f"server has other rows of a step{why}. Received: {type(regularizer).__name__}"
    )


def check_constraint(config: Mapping[str, Any] | None, dim: int, instead: str = "") -> None:
    """Raises ValueError if a serialized constraint does not take each row by itself.

    Args:
        instead: Another way out, for the message.
    """
    if config is None:
        return
    why = "what it makes of a row depends on the other rows"
    try:
        constraint = keras.constraints.get(config)
        for scale in _CHECK_SCALES:
            values = np.random.RandomState(0).standard_normal((_CHECK_ROWS, dim)) * scale
            rows = tf.constant(values, tf.float32)
            one_by_one = tf.concat([constraint(row[tf.newaxis]) for row in rows], 0)
            if not np.allclose(constraint(rows), one_by_one, rtol=1e-4, atol=1e-6 * scale):
                break
        else:
            return
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    name, given = config["class_name"], config["config"]
    raise ValueError(
        f"The constraint {name} cannot be applied to single rows of a table ({why}). Use one that "
        "takes each row by itself, such as `keras.constraints.MaxNorm(2.0, axis=1)`, where 0 is "
        "the default, or NonNeg (an own class needs `@keras.saving.register_keras_serializable()`)"
        f"{instead}. Received: {name}({given})"
    )


def _refusal(config: Mapping[str, Any], why: str) -> str:
    name = config["optimizer"]["class_name"]
    return (
        f"{name} cannot be applied to the rows of a table by themselves ({why}). Use an optimizer "
        "that computes element by element, such as SGD, Adagrad, Adam, AdamW, RMSprop, Ftrl or "
        "Lion (an own class needs `@keras.saving.register_keras_serializable()`), or keep a table "
        f'of numbered rows on the workers (`placement="mirrored"`). Received: optimizer={name}'
    )
