"""Variables that Keras, the tape and checkpoints accept, without a single resource."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.tf_internals import resource_variable_ops, tensor_conversion_registry
from keras_psplus.tf_internals import types_core as core


class CompositeVariable(resource_variable_ops.BaseResourceVariable, core.Tensor):
    """A variable whose value lies in other places than one handle's.

    Subclasses have `handle`, by which the tape knows them, `device`, `shape`, `value`, `numpy`,
    `assign` and `sparse_read`.
    """

    def __init__(
        self, trainable: bool, shape: Any, dtype: tf.DType, unique_id: str, name: str
    ) -> None:
        self._whole_shape = tf.TensorShape(shape)
        super().__init__(
            trainable=trainable,
            shape=self._whole_shape,
            dtype=dtype,
            handle=None,
            unique_id=unique_id,
            in_graph_mode=False,
            handle_name=name,
            synchronization=tf.VariableSynchronization.NONE,
        )

    @classmethod
    def _variable_call(cls, *args: Any, **kwargs: Any) -> None:
        # The metaclass of tf.Variable would hand the call to the strategy's creator.
        return None

    @property
    def shape(self) -> tf.TensorShape:
        return self._whole_shape

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    def read_value(self) -> tf.Tensor:
        return self.value()

    def numpy(self) -> np.ndarray:
        array: np.ndarray = self.value().numpy()
        return array

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def _dense_var_to_tensor(
        self, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        value = self.value()
        return value if dtype is None else tf.cast(value, dtype)

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        return tf.constant(True)

    def _should_act_as_resource_variable(self) -> None:
        pass

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(tf.ensure_shape(restored_tensors["VARIABLE_VALUE"], self._whole_shape))

    def __getitem__(self, key: Any) -> tf.Tensor:
        return self.value()[key]


class WrittenVariable(CompositeVariable):
    """A composite variable that an update can write to, by values or by rows."""

    def _write(self, method: str, value: Any) -> Any:
        raise NotImplementedError

    def _scatter(self, method: str, slices: tf.IndexedSlices) -> Any:
        raise NotImplementedError

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._write("assign", value)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return self._write("assign_add", delta)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return self._write("assign_sub", delta)

    def scatter_add(self, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_update(self, sparse_delta: tf.IndexedSlices, *args: Any, **kwargs: Any) -> Any:
        return self._scatter("scatter_update", sparse_delta)


tensor_conversion_registry.register_tensor_conversion_function(
    CompositeVariable,
    lambda value, dtype=None, name=None, as_ref=False: value._dense_var_to_tensor(dtype, name),
)


def _overload(operator: str) -> None:
    of_tensor = getattr(tf.Tensor, operator)

    def of_variable(self: CompositeVariable, *args: Any, **kwargs: Any) -> Any:
        return of_tensor(self.value(), *args, **kwargs)

    setattr(CompositeVariable, operator, of_variable)


for _operator in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__", "__getitem__"}:
    _overload(_operator)


# A replica's own copy of a mirrored variable.


def own_copy(variable: Any) -> Any:
    """This replica's copy of a mirrored variable; another variable is returned as it is."""
    if hasattr(variable, "_get_on_device_or_primary"):
        return variable._get_on_device_or_primary()
    return variable
