"""State that lasts from step to step, as variables of one replica."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import autotrackable, nest, resource_variable_ops
from keras_psplus.tf_internals import framework_ops as ops


class States(autotrackable.AutoTrackable):
    """Variables of one replica that no other replica shares, found by name.

    They are made when they are first asked for, which may be inside a `tf.function` or a branch.
    A checkpoint that was read before gives them their values then.

    Args:
        device: Device of the replica.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        # Or checkpoints would follow this dict as well, under its own names.
        self._states = self._no_dependency({})

    def read(self, name: str, init: Callable[[], Any]) -> Any:
        """Reads a state.

        Args:
            name: Its name.
            init: Function that makes the first state, a nested structure of tensors.

        Returns:
            The structure of tensors, as of now.
        """
        if name not in self._states:
            with ops.init_scope(), ops.device(self._device):
                first = init()
                leaves = nest.flatten_with_joined_string_paths(first)
                variables = [self._make(f"{name}/{path}", leaf) for path, leaf in leaves]
            self._states[name] = tf.nest.map_structure(lambda _: 0, first), variables
        structure, variables = self._states[name]
        return tf.nest.pack_sequence_as(structure, [v.read_value() for v in variables])

    def variable(self, name: str, shape: Any, dtype: tf.DType | str) -> tf.Variable:
        """Makes a variable of zeros, to be read and written as any.

        Args:
            name: A name that is not given twice.
            shape: Its shape; the number of rows may be None, and is 0 at first.
            dtype: Its dtype.

        Returns:
            The variable.
        """
        with ops.init_scope(), ops.device(self._device):
            zeros = tf.zeros([size or 0 for size in tf.TensorShape(shape).as_list()], dtype)
            return self._make(name, zeros, shape)

    def write(self, name: str, state: Any) -> list[tf.Operation]:
        """Writes a state, which has been read before; returns the operations that do so."""
        _, variables = self._states[name]
        return [
            variable.assign(value, read_value=False)
            for variable, value in zip(variables, tf.nest.flatten(state), strict=True)
        ]

    def _make(self, name, value, shape=None):
        variable = resource_variable_ops.ResourceVariable(value, trainable=False, shape=shape)
        # With the shape, so that a checkpoint of another model or bucket size is left alone.
        name = f"{name}:{'x'.join(map(str, variable.shape.as_list()))}"
        self._track_trackable(variable, name)
        self._handle_deferred_dependencies(name, variable)
        return variable
