"""Base classes of update rules.

An update rule says when gradients are applied, and when workers communicate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import keras
import tensorflow as tf

Grads: TypeAlias = Sequence[tf.Tensor | tf.IndexedSlices | None]
# Applies gradients to variables.
Apply: TypeAlias = Callable[[Sequence[Any], Sequence[keras.Variable]], Any]


class Form(NamedTuple):
    """Types and shape of a gradient, needed to allocate its accumulator.

    Attributes:
        dtype: Its dtype.
        index_dtype: That of the rows' numbers, if it is `tf.IndexedSlices`; else None.
        shape: Its static shape, which is that of a worker's part where it computes with one.
        join: Function that turns rows of several batches into those of one, or None.
        add: Function that does so for each batch's, with the vector of the counts of the rows so
            far and of this batch; or None.
    """

    dtype: tf.DType
    index_dtype: tf.DType | None
    shape: Sequence[int]
    join: Callable[[tf.IndexedSlices], tf.IndexedSlices] | None = None
    add: Callable[[tf.IndexedSlices, tf.Tensor], tf.IndexedSlices] | None = None


class States(Protocol):
    """Variables of zeros, one of each for every replica, which backups keep."""

    def variable(self, name: str, shape: Any, dtype: Any, on_host: bool = False) -> Any:
        """Makes or finds a variable, which has `read_value`, `assign` and `assign_add`."""


class Step(Protocol):
    """Replica's step, as update rules see it; a worker's of parameter servers has `rows` alone."""

    def rows(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of the replica and those of all replicas, scalar tensors."""

    def batch_fraction(self) -> tf.Tensor:
        """The replica's fraction of the rows of all replicas, a scalar tensor."""

    def applying_alone(self) -> AbstractContextManager[None]:
        """Context in which optimizers apply this replica's gradients, and nothing is sent."""

    def unscale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor:
        """Divides a part of the global gradient by the replica's fraction of the rows.

        Args:
            value: The part, a tensor.
        """

    def sum_over_group(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Sums small tensors over the replicas of this one's group in a topology.

        Args:
            tensors: The tensors.
        """


class Context(NamedTuple):
    """Context of an update rule, for one replica and one optimizer.

    Attributes:
        states: `States`: `variable(name, shape, dtype)` makes a variable of zeros, of the replica's
            own, or finds it. It has `read_value()`, `assign(value, read_value=False)` and
            `assign_add`. Backups keep these variables. With `on_host=True` it is in the host's
            memory, for conditions that would make a GPU wait for the host.
        name: Prefix that distinguishes these variables from others of the same optimizer.
        forms: List of `Form`, of the gradients to come; None for None.
        variables: Their Keras variables.
        parts: The result of `on_build`, with the trained variables only.
        averaged: Further variables of the optimizer's that are to be averaged with the weights.
        sums: Function of a list of tensors, their Keras variables, an int64 scalar that counts
            the calls, and whether to compress. It returns the sums over all replicas.
        group_sums: Function of a list of tensors, their Keras variables and an int64 scalar, that
            returns the sums over the replicas of this one's group in a topology: these step
            together. None without groups.
    """

    states: States
    name: str
    forms: Sequence[Form | None]
    variables: list[keras.Variable]
    parts: Sequence[tuple[list[keras.Variable], keras.optimizers.Optimizer | None]] = ()
    averaged: Sequence[keras.Variable] = ()
    sums: Callable[..., list[tf.Tensor]] | None = None
    group_sums: Callable[..., list[tf.Tensor]] | None = None


class ReplicaUpdates:
    """Base class of what an update rule does on one replica."""

    def on_gradients(
        self, step: Step, grads: Grads, variables: Sequence[keras.Variable], apply: Apply
    ) -> None:
        """Takes the gradients of one batch, while a step is traced.

        Args:
            step: The replica's step, a `Step`.
            grads: The replica's parts of the global gradients: tensors, `tf.IndexedSlices` or None.
            variables: Their Keras variables.
            apply: Function of a list of gradients and of variables. It sums the gradients over the
                replicas, unless within `step.applying_alone()`, and has the optimizer apply them.
        """
        raise NotImplementedError

    def on_finish(self, step: Step, apply: Apply) -> None:
        """Has everything applied that is still to be, and leaves all replicas the same weights.

        It is called before weights are read: at the end of `fit`, before validation, for saving.

        Args:
            step: As for `on_gradients`.
            apply: As for `on_gradients`.
        """

    @property
    def count(self) -> tf.Tensor:
        """Number of batches whose gradients wait for an update, a scalar integer tensor."""
        return tf.constant(0, tf.int64)

    @property
    def batches(self) -> int:
        """Number of batches whose gradients wait for an update."""
        return int(self.count.numpy())


class Updates:
    """Base class of update rules: options, and nothing that changes.

    A rule of your own is a class with `on_replica`, and an instance of it is what strategies take
    as `updates=`.

    Attributes:
        local: Whether workers step alone, so that their weights differ until they are averaged.
            `HybridStrategy` does not take such rules.
        average_slots: Whether a rule that is `local` averages the optimizer's slots as well.
        steps: Batches for each update of the optimizer.
        flush: Whether the end of an epoch updates with what there is.
        on_parameter_servers: Whether `ParameterServerStrategy` takes the rule. Of a rule that is
            `local` it uses `every`, `start_step` and `average_slots`, as `LocalSGD` has them, in
            place of `on_replica`.

    Example:

    ```python
    class Every(keras_psplus.updates.Updates):
        # Applies the gradients of every second batch, twice as large, and drops the others.

        def on_replica(self, context):
            return OnReplica(context.states.variable(f"{context.name} batches", [], "int64"))


    class OnReplica(keras_psplus.updates.ReplicaUpdates):
        def __init__(self, batches):
            self._batches = batches

        def on_gradients(self, step, grads, variables, apply):
            self._batches.assign_add(1, read_value=False)
            odd = self._batches.read_value() % 2 == 1
            doubled = [None if grad is None else 2 * grad for grad in grads]
            tf.cond(odd, lambda: apply(doubled, variables), lambda: None)
    ```
    """

    local = False
    average_slots = False
    steps = 1
    flush = False
    on_parameter_servers = False

    def on_build(
        self, variables: list[keras.Variable]
    ) -> list[tuple[list[keras.Variable], keras.optimizers.Optimizer | None]]:
        """Divides the variables into parts that are averaged at different steps.

        It is called once for each optimizer, in the strategy's scope, if the rule is `local`.

        Args:
            variables: All Keras variables that the optimizer trains.

        Returns:
            List of pairs: a list of variables, and a Keras optimizer that is built with them or
            None. Backups keep the optimizers' variables.
        """
        return [(variables, None)]

    def on_replica(self, context: Context) -> ReplicaUpdates:
        """Makes what takes the gradients on one replica.

        Args:
            context: `Context`.

        Returns:
            `ReplicaUpdates`.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self)).parameters
        options = [f"{name}={getattr(self, name)!r}" for name in parameters]
        return f"{type(self).__name__}({', '.join(options)})"


# The numbers of a gradient, whether it is dense or has rows.


def map_values(
    function: Callable[[tf.Tensor], tf.Tensor], gradient: tf.Tensor | tf.IndexedSlices | None
) -> tf.Tensor | tf.IndexedSlices | None:
    """Applies a function to a gradient's numbers.

    Embeddings have gradients of rows, `tf.IndexedSlices`, which cannot be computed with as tensors
    can.

    Args:
        function: Function of a tensor that returns one of the same shape, by elements.
        gradient: Tensor, `tf.IndexedSlices` or None.

    Returns:
        What the function has made of the tensor, or of the values of the slices; None for None.

    Example:

    ```python
    doubled = [updates.map_values(lambda values: 2 * values, grad) for grad in grads]
    ```
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else function(gradient)


def numbers_of(gradients: Iterable[Any]) -> list[Any]:
    """Tensors with the numbers of gradients, which may be `tf.IndexedSlices`."""
    return [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]


def no_rows_of(tensor: tf.Tensor) -> tf.Tensor:
    """None of a tensor's rows, which the graph does not know.

    TensorFlow takes the shape that a function assigns to a variable for that of what it has read
    before: with `tf.zeros([0])`, `tf.size` of the variable's rows is 0.
    """
    return tensor[: tf.minimum(tf.shape(tensor)[0], 0)]


def zeros_like(tensor: tf.Tensor) -> tf.Tensor:
    """Zeros in the place of a tensor, made when the tensor is there.

    Those of `tf.zeros` are constants of a graph for TensorFlow, which take their memory from the
    first step to the last: in the places of gradients, as much as the model.

    Args:
        tensor: Tensor of static shape; of another one, they are those of `tf.zeros_like`.
    """
    size = tensor.shape.num_elements()
    if not size:
        return tf.identity(tensor) if size == 0 else tf.zeros_like(tensor)
    first = tf.reshape(tensor, [-1])[0]
    # False, which TensorFlow cannot know.
    never = tf.logical_and(first != first, tf.equal(first, first))
    return tf.fill(tensor.shape, tf.cast(never, tensor.dtype))
