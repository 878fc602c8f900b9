"""Worker functions, which run one or several steps without state.

Metric states and seeds live on the chief. A worker function receives their values with its
arguments, changes copies of them that last as long as the call, and returns its increments. That
costs no round trips, every step is counted exactly once however workers fail, and a restarted
worker has nothing to restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.core.base.metric_state import added
from keras_psplus.core.base.thread_value import ThreadValue
from keras_psplus.tf_internals import context, resource_variable_ops
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import types_core as core

_READS = ("ReadVariableOp", "VariableShape")
NOTHING_KEPT = -1
# The worker function that a thread is tracing.
current_trace: ThreadValue[Trace] = ThreadValue()


class Trace:
    """One tracing of a worker function.

    `initial` is a float64 vector, the values of the closure variables in the order in which the
    function comes upon them, and behind them the number of the run, if it has `tables`.

    Attributes:
        variables: The closure variables so far.
        tables: Dynamic tables that the function keeps gradients for.
        kept: Sums and copies that the worker keeps from step to step. The `count` of each, a
            tensor, is of how many batches it has something that is not sent yet.
    """

    def __init__(self, initial: tf.Tensor) -> None:
        self._initial = initial
        self._graph = ops.get_default_graph()
        self._handles: dict[int, tf.Tensor] = {}
        # Names of the assignments of initial values.
        self._first_writes: set[str] = set()
        self._size = 0
        self.variables: list[ClosureVariable] = []
        self.tables: list[Any] = []
        self.kept: list[Any] = []

    def handle_of(self, variable: ClosureVariable) -> tf.Tensor:
        """The handle of the worker's own copy of a closure variable."""
        key = id(variable)
        if key not in self._handles:
            size = variable.shape.num_elements()
            # In the function itself, also if a branch of a tf.cond comes upon it first.
            with self._graph.as_default(), ops.control_dependencies(None), ops.device(None):
                handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    variable.shape, variable.dtype, context.anonymous_name(), "travelling", True
                )
                value = tf.reshape(self._initial[self._size : self._size + size], variable.shape)
                value = tf.cast(value, variable.dtype)
                first = tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            self._first_writes.add(first.name)
            self._size += size
            self._handles[key] = handle
            self.variables.append(variable)
        return self._handles[key]

    def keep(self, table: Any, name: str) -> tf.Tensor:
        """Notes that a gradient is kept for a table; returns the number of the run.

        Raises:
            ValueError: If that may happen in some runs only, or twice in one.
        """
        if ops.get_default_graph() is not self._graph or any(one is table for one in self.tables):
            raise ValueError(
                'With `mode="async"`, a step applies the gradient of a DynamicEmbedding\'s table '
                "once, and outside of loops, branches and functions of its own: the chief updates "
                "the rows once the step is back. A dynamic loss scale, as of mixed_float16, is "
                'such a branch: use mixed_bfloat16, or `mode="sync"`. '
                f"Received: the table '{name}'"
            )
        self.tables.append(table)
        return tf.cast(self._initial[-1], tf.int64)

    def overwritten(self) -> list[ClosureVariable]:
        """Closure variables, but for seeds, that are given values not made by adding."""
        return [v for v in self.variables if not v.is_seed and self._is_overwritten(v)]

    def _is_overwritten(self, variable: ClosureVariable) -> bool:
        handle = self._handles[id(variable)]
        # TensorFlow keeps no order of consumers.
        others = (op for op in handle.consumers() if op.name not in self._first_writes)
        writes = (op for op in others if op.type not in _READS)
        return not all(
            op.type in ("AssignAddVariableOp", "AssignSubVariableOp")
            or (op.type == "AssignVariableOp" and _adds_to(handle, op.inputs[1]))
            for op in writes
        )

    def pending(self) -> tf.Tensor:
        """Largest `count` of what is kept, or `NOTHING_KEPT`; a float64 vector of one number."""
        counts = [one.count for one in self.kept]
        pending = tf.reduce_max(tf.stack(counts)) if counts else NOTHING_KEPT
        return tf.cast(tf.reshape(pending, [1]), tf.float64)

    def changes(self) -> tf.Tensor:
        """Increments of the closure variables, a float64 vector."""
        values = [
            tf.reshape(
                tf.cast(
                    tf.raw_ops.ReadVariableOp(
                        resource=self._handles[id(variable)], dtype=variable.dtype
                    ),
                    tf.float64,
                ),
                [-1],
            )
            for variable in self.variables
        ]
        after = tf.concat([*values, tf.zeros([0], tf.float64)], 0)
        return added(after, self._initial[: self._size])


def _adds_to(handle: tf.Tensor, value: tf.Tensor) -> bool:
    """Whether a value is a sum of a variable's value and something else."""
    op = _source(value)
    if op.type not in ("Add", "AddV2", "Sub"):
        return False
    terms = op.inputs[:1] if op.type == "Sub" else op.inputs
    sources = [_source(term) for term in terms]
    return any(op.type == "ReadVariableOp" and op.inputs[0] is handle for op in sources)


def _source(tensor: tf.Tensor) -> tf.Operation:
    op = tensor.op
    while op.type in ("Identity", "Cast", "EnsureShape", "Reshape"):
        op = op.inputs[0].op
    return op


class ClosureVariable(resource_variable_ops.BaseResourceVariable, core.Tensor):
    """A small variable of the chief that worker functions get a copy of.

    Args:
        kind: `"total"`, a metric's state; `"seed"`, that of a seed generator, `(seed, counter)`; or
            `"state"`, of a layer that changes it in each step, such as BatchNormalization.
    """

    def __init__(self, variable: tf.Variable, kind: str) -> None:
        self._chief_variable = variable
        self.kind = kind
        super().__init__(
            trainable=False,
            shape=variable.shape,
            dtype=variable.dtype,
            handle=variable._handle,
            handle_name=variable.name.split(":")[0],
            unique_id=variable._unique_id,
            in_graph_mode=False,
            synchronization=tf.VariableSynchronization.NONE,
        )

    @property
    def is_seed(self) -> bool:
        """Whether it is the state of a seed generator."""
        return self.kind == "seed"

    @property
    def handle(self) -> tf.Tensor:
        trace = current_trace()
        return self._chief_variable._handle if trace is None else trace.handle_of(self)

    @property
    def device(self) -> str:
        return self._chief_variable.device

    @classmethod
    def _variable_call(cls, *args: Any, **kwargs: Any) -> None:
        # The metaclass of tf.Variable would hand the call to the strategy's creator.
        return None

    def _should_act_as_resource_variable(self) -> None:
        pass


def is_on_ps(variable: tf.Variable) -> bool:
    """Whether a variable of TensorFlow's lies on a parameter server."""
    return "/job:ps/" in (getattr(variable, "device", None) or "")


def pack(variables: Sequence[ClosureVariable]) -> np.ndarray:
    """The chief's values of closure variables as one float64 vector."""
    return np.concatenate(
        [v._chief_variable.numpy().astype("float64").ravel() for v in variables] or [np.zeros(0)]
    )


def unpack(variables: Sequence[ClosureVariable], packed: np.ndarray) -> None:
    """Sets the chief's closure variables from one float64 vector."""
    first = 0
    for variable in variables:
        size = variable.shape.num_elements()
        value = packed[first : first + size].reshape(variable.shape.as_list())
        variable._chief_variable.assign(value.astype(variable.dtype.as_numpy_dtype))
        first += size
