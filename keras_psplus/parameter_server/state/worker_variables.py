"""Variables of each worker's own, and states of them, in functions that workers run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.parameter_server.state.worker_state import WorkerStates
from keras_psplus.tf_internals import nest


class WorkerVariable:
    """A variable of the worker that runs the function which is being traced."""

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
        prefix: Of their names.

    Attributes:
        is_saved: Whether they are saved with the states of their worker.
    """

    is_saved = True

    def __init__(self, states: WorkerStates, prefix: str) -> None:
        self._states, self._prefix = states, prefix
        self._made: dict[str, WorkerVariable] = {}

    def variable(
        self,
        name: str,
        shape: tf.TensorShape | Sequence[int | None],
        dtype: tf.DType | str,
        on_host: bool = False,
    ) -> WorkerVariable:
        """A variable of zeros; it can be used once `begin` has been called.

        Its number of rows may be None, and is 0 at first. A worker waits for servers in each step,
        so that it makes no difference to it if its GPU waits for the host: `on_host` is ignored.
        """
        name, form = f"{self._prefix}/{name}", (tf.TensorShape(shape), tf.as_dtype(dtype))
        handle = self._states.handle(name, *form)
        self._made[name] = WorkerVariable(handle, *form)
        return self._made[name]

    def begin(self, initialize: Callable[[], Any] | None = None) -> None:
        """Makes the variables, all of them, where the worker does not have them yet.

        `initialize` gives all their values, if these are not zeros.
        """
        made = self._made.values()
        forms = {name: (variable.shape, variable.dtype) for name, variable in self._made.items()}
        self._states.register(forms, self.is_saved)

        are_there = [tf.raw_ops.VarIsInitializedOp(resource=variable.handle) for variable in made]
        # Not 0 for the graph, which would take that for the size of what is read: `no_rows_of`.
        none = tf.minimum(tf.cast(tf.reduce_all(tf.stack(are_there)), tf.int32), 0)

        def make() -> tf.Tensor:
            for variable in made if initialize is None else ():
                sizes = [none if size is None else size for size in variable.shape.as_list()]
                variable.assign(tf.zeros(sizes, variable.dtype))
            if initialize is not None:
                initialize()
            return tf.constant(True)

        tf.cond(tf.reduce_all(tf.stack(are_there)), lambda: tf.constant(True), make)


def read_state(
    states: WorkerStates, name: str, init: Callable[[], Any]
) -> tuple[Any, Callable[[Any], None]]:
    """Reads a state of the present worker; `init` makes the first one.

    Returns:
        The nested structure of tensors, and a function that writes another like it.
    """
    with tf.Graph().as_default():
        first = init()
        leaves = nest.flatten_with_joined_string_paths(first)
        forms = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves}
    structure = tf.nest.map_structure(lambda _: 0, first)
    if not forms:
        return structure, lambda state: None
    maker = WorkerVariables(states, name)
    variables = [maker.variable(path, *form) for path, form in forms.items()]

    def write(state: Any) -> None:
        tf.nest.assert_same_structure(structure, state)
        for variable, value in zip(variables, tf.nest.flatten(state)):
            variable.assign(value)

    maker.begin(lambda: write(init()))
    values = [variable.read_value() for variable in variables]
    return tf.nest.pack_sequence_as(structure, values), write
