"""Weights in shares, and whole weights in updates that are not element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.graph.variables import record_read
from keras_psplus.keras_internals.keras_parts import global_state
from keras_psplus.sharding.variable import ShareVariable, TensorVariable, in_update
from keras_psplus.tf_internals import (
    control_flow_func_graphs,
    framework_ops,
    record,
    resource_variable_ops,
)

if TYPE_CHECKING:
    from keras_psplus.sharding.places import Place
    from keras_psplus.sharding.store import ShareStore


class PartOfWeight(ShareVariable):
    """A weight of which each worker keeps a part.

    In a step, its graph reads the whole of it, or layers compute with parts.

    Attributes:
        given_to: Names of functions for XLA that are given the whole of it.
    """

    def __init__(self, store: ShareStore, place: Place, variable: keras.Variable) -> None:
        dtype = tf.as_dtype(variable._dtype)
        self.path, self.given_to = variable.path, set[str]()
        super().__init__(
            store,
            tuple(variable._shape),
            dtype,
            variable.path,
            lambda: place,
            lambda place, shape: tf.zeros(shape, dtype),
            trainable=True,
        )
        assert self.place is place

    def value(self) -> tf.Tensor:
        if in_update:
            return self.part.value()
        if tf.executing_eagerly():
            if current_step() is not None:
                raise self._error_of_eager_read()
            return self._recorded(super().value)
        if global_state.get_global_attribute("symbolic_scope") is not None:
            # Keras asks for shapes: nothing is computed.
            return tf.zeros(self._whole_shape, self.dtype)
        if current_step() is None and not tf.distribute.has_strategy():
            # A function of the script, which one worker may call alone: for generation, say.
            return self._recorded(self._value_of_now)
        return self._value_in_step()

    def _value_of_now(self) -> tf.Tensor:
        """The whole of it when a graph runs."""
        # By the handle, TensorFlow keeps the order of reads and of updates in the function.
        whole = tf.py_function(lambda _: self._store.read(self), [self.handle], self.dtype)
        return with_gradient(tf.ensure_shape(whole, self._whole_shape), self)

    def _recorded(self, read: Callable[[], tf.Tensor]) -> tf.Tensor:
        """The whole of it outside of steps, whose whole gradient a tape finds."""
        resource_variable_ops.variable_accessed(self)
        with record.stop_recording():
            whole = read()
        record_read(self, whole)
        return whole

    def record(self, value: tf.Tensor) -> None:
        """Tells tapes that a value, made unseen, is what a step reads of it."""
        record_read(self, value)

    def _error_of_eager_read(self) -> RuntimeError:
        raise NotImplementedError

    def _value_in_step(self) -> tf.Tensor:
        """The whole of it, in the graph of a step."""
        raise NotImplementedError


class WeightShare(PartOfWeight):
    """A weight of which each worker keeps a part, gathered for a step's units.

    Args:
        read: Function of a weight that returns the whole of it, in the graph of a step, and lets
            tapes know.
        note_write: Function of a weight that such a graph is about to change.
    """

    def __init__(
        self,
        store: ShareStore,
        place: Place,
        read: Callable[[Any], tf.Tensor],
        note_write: Callable[[Any], None],
        variable: keras.Variable,
    ) -> None:
        self._read, self._note_write = read, note_write
        super().__init__(store, place, variable)

    def _error_of_eager_read(self) -> RuntimeError:
        return RuntimeError(
            'With `shard="all"`, a replica computes with weights in a `tf.function` alone: '
            "eager replicas cannot gather them. Call `strategy.run` in a `tf.function`. "
            f"Received: an eager step that reads '{self.path}'"
        )

    def _value_in_step(self) -> tf.Tensor:
        return self._read(self)

    @property
    def written(self) -> tf.Variable:
        self._note_write(self)
        return self.part


class WholeWeight(TensorVariable):
    """The whole value of a weight in shares, in an update."""

    def __init__(self, weight: PartOfWeight, value: tf.Tensor) -> None:
        self.path = weight.path
        super().__init__(value, weight)


@tf.RegisterGradient("ShardedRead")
def _gradient_of_read(op: tf.Operation, grad: tf.Tensor, _: Any) -> tuple[None, tf.Tensor]:
    if isinstance(op.graph, control_flow_func_graphs.WhileBodyFuncGraph):
        raise ValueError(
            "With weights in shares, `tf.while_loop` has no gradients of weights its body gathers. "
            "Put the loop into the `call` of a layer, whose weights are gathered before it. "
            f"Received: the body '{op.graph.name}'"
        )
    return None, grad


def with_gradient(whole: tf.Tensor, weight: PartOfWeight) -> tf.Tensor:
    """A whole weight whose gradient is the weight's, also in a function that others call.

    What calls it differentiates its operations, of which no tape has a record.
    """
    graph = framework_ops.get_default_graph()
    with record.stop_recording(), graph.gradient_override_map({"IdentityN": "ShardedRead"}):
        read: tf.Tensor = tf.raw_ops.IdentityN(input=[whole, weight.handle])[0]
    return read
