"""Variables of each worker's own, in the functions that workers run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from keras_psplus.parameter_server.state.worker_state import WorkerStates


class WorkerVariable:
    """A variable of the worker that runs the function which is being traced.

    Args:
        handle: Its handle there.
        shape: Its shape; sizes may be None.
        dtype: Its dtype.
    """

    def __init__(self, handle: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType) -> None:
        self.handle, self.shape, self.dtype = handle, shape, dtype

    def read_value(self) -> tf.Tensor:
        """The value as of now."""
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        value.set_shape(self.shape)
        return value

    def assign(self, value: Any, read_value: bool = False) -> None:
        """Sets the value."""
        value = tf.convert_to_tensor(value, self.dtype)
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def assign_add(self, value: Any, read_value: bool = False) -> None:
        """Adds to the value."""
        value = tf.convert_to_tensor(value, self.dtype)
        tf.raw_ops.AssignAddVariableOp(resource=self.handle, value=value)


class WorkerVariables:
    """Makes variables that belong together: a worker that misses one begins again with all.

    Args:
        states: `WorkerStates` that keep them.
        prefix: Of their names.

    Attributes:
        is_saved: Whether they are saved with the states of their worker.
    """

    is_saved = True

    def __init__(self, states: WorkerStates, prefix: str) -> None:
        self._states, self._prefix = states, prefix
        self._made: dict[str, WorkerVariable] = {}

    def variable(
        self, name: str, shape: tf.TensorShape | Sequence[int | None], dtype: tf.DType | str
    ) -> WorkerVariable:
        """A variable of zeros; it can be used once `begin` has been called.

        Args:
            name: Its name.
            shape: Its shape; the number of rows may be None, and is 0 at first.
            dtype: Its dtype.

        Returns:
            The `WorkerVariable`.
        """
        name, form = f"{self._prefix}/{name}", (tf.TensorShape(shape), tf.as_dtype(dtype))
        handle = self._states.handle(name, *form)
        self._made[name] = WorkerVariable(handle, *form)
        return self._made[name]

    def begin(self, initialize: Callable[[], Any] = lambda: None) -> None:
        """Makes the variables, all of them, where the worker does not have them yet.

        Args:
            initialize: Function that gives new ones their values, if these are not zeros.
        """
        forms = {name: (v.shape, v.dtype) for name, v in self._made.items()}
        self._states.register(forms, self.is_saved)

        def make() -> tf.Tensor:
            for variable in self._made.values():
                sizes = [size or 0 for size in variable.shape.as_list()]
                variable.assign(tf.zeros(sizes, variable.dtype))
            initialize()
            return tf.constant(True)

        handles = [variable.handle for variable in self._made.values()]
        are_there = [tf.raw_ops.VarIsInitializedOp(resource=handle) for handle in handles]
        tf.cond(tf.reduce_all(tf.stack(are_there)), lambda: tf.constant(True), make)
