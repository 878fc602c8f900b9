"""One worker's share of a global batch, while the step that it takes is traced.

A global step's gradient is that of the mean over all rows of its batch. Each worker takes the
gradient of the mean over its own rows, times `local_rows / global_rows`; the parameter servers add
these up. What the step does with gradients, it does not do on the worker: it hands them over here.

Losses that divide by the entries that a mask leaves, or by sums of sample weights, divide by those
of the global batch. The chief, which has it, computes them before the workers begin:

    chief      share 1 ─► own sums ─┐
               share 2 ─► own sums ─┴─► sums over the batch ─► first argument of each worker's step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.base.optimizers import unwrapped
from keras_psplus.core.batch.replica_step import ReplicaStep
from keras_psplus.core.graph import stand_ins
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.core.graph.subgraph import Subgraph
from keras_psplus.engine import Engine
from keras_psplus.parameter_server import pulls, worker_function
from keras_psplus.parameter_server.pulls import parts_of, path_of
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.updates import map_values

_CALLS = *("PartitionedCall", "StatefulPartitionedCall", "If", "While", "Case"), *("StatelessIf",)


def _has_own_apply(optimizer: keras.optimizers.Optimizer | None) -> bool:
    """Whether an optimizer's class is the script's, with an `apply` of its own."""
    return optimizer is not None and any(
        "apply" in vars(base) and not base.__module__.startswith("keras.")
        for base in type(optimizer).__mro__
    )


class WorkerReplicaStep(ReplicaStep):
    """Context of tracing one worker's part of a step.

    `weight` is the share's part of the global batch's rows. `push` is called with each optimizer,
    its gradients and variables, and `handed_over` has what it returned; `first_hand_over` is how
    many operations the function had before. `sums` are those over the whole batch of what is
    `asked` for, in this order and as long as the step needs.
    """

    has_batch_fraction = True

    def __init__(
        self, engine: Engine, weight: tf.Tensor, sums: tf.Tensor, push: Callable[..., Any]
    ) -> None:
        super().__init__(engine)
        self._weight, self._sums, self._push = weight, sums, push
        self.asked: list[tf.Tensor] = []
        self._graph = ops.get_default_graph()
        self._optimizers: list[keras.optimizers.Optimizer] = []
        self._calls: list[stand_ins.TapeCall] = []
        self.handed_over: list[Any] = []
        self.first_hand_over: int | None = None
        # By ids of variables of TensorFlow's, what updates them once all gradients are there.
        self._updated: dict[int, tuple[keras.optimizers.Optimizer, keras.Variable]] = {}

    def batch_fraction(self) -> tf.Tensor:
        return self._weight

    def unscale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor:
        return value / tf.cast(self._weight, value.dtype)

    def sum_over_replicas(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if ops.get_default_graph() is not self._graph:
            _refuse_sum("in a tf.function, a branch or a loop of its own")
        first = len(self.asked)
        self.asked += tensors
        with tf.control_dependencies(None):
            return [tf.cast(self._sums[first + i], t.dtype) for i, t in enumerate(tensors)]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if exc[0] is None:
            self._check_unused(())
            self._check_calls()
            self._check_writes()

    def note(self, gradients: list[Gradient | None], variables: list[Any]) -> list[Any]:
        self._calls.append(stand_ins.TapeCall(gradients, variables))
        return self._calls[-1].given

    @property
    def is_inside(self) -> bool:
        """Whether a function, a branch or a loop is being traced, or code for rows."""
        graph = ops.get_default_graph()
        return graph is not self._graph or self._is_by_row(graph)

    def note_inside(self, grads: Any, sources: Any) -> Any:
        """As `note`, of gradients of the mean over this share's own rows."""
        if self._is_by_row(ops.get_default_graph()):
            return grads
        return tf.nest.pack_sequence_as(
            sources, self.note(tf.nest.flatten(grads), tf.nest.flatten(sources))
        )

    def _is_by_row(self, graph: tf.Graph) -> bool:
        return stand_ins.is_without_collectives(graph, self._graph)

    def _check_unused(
        self,
        gradients: Iterable[Gradient | None],
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        for call in self._calls:
            changed = any(
                call.has_made(one) or call.was_changed_inside(one) or call.was_changed_outside(one)
                for one in gradients
            )
            if changed and _has_own_apply(optimizer):
                raise ValueError(
                    "With `mode=\"sync\"`, an optimizer's `apply` gets one worker's part of the "
                    "gradients, and the sum is made behind it: an optimizer of your own that "
                    "changes gradients does so in its `update_step`, which gets their sums; or "
                    'use `mode="async"` or MultiWorkerMirroredStrategy, under which it works. '
                    f"Received: {type(optimizer).__name__}.apply(), which changes the gradients of "
                    f"{call.describe()}"
                )
            if changed or call.is_used() or call.is_used_inside():
                raise ValueError(
                    'With `mode="sync"`, what `tape.gradient` returns is one worker\'s part of '
                    "the gradient, and workers cannot ask each other within a step: a "
                    "`train_step` gives it to the optimizer as it is, and does not compute with "
                    "it. Clip by the optimizer's `clipnorm`, `global_clipnorm` or `clipvalue`, "
                    'which see the sum, or use `mode="async"` or MultiWorkerMirroredStrategy. '
                    f"Received: a step that uses the gradients of {call.describe()}"
                )

    def hand_over(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[Gradient | None],
        variables: list[keras.Variable],
    ) -> None:
        """Takes gradients that an optimizer is to apply, once, outside of loops."""
        is_inside = ops.get_default_graph() is not self._graph
        if is_inside or any(optimizer is other for other in self._optimizers):
            where = "in a loop, a branch or a tf.function" if is_inside else "twice"
            raise ValueError(
                'With `mode="sync"`, a `train_step` applies the gradients of each optimizer once, '
                "outside of loops, branches and functions of its own: they are applied when those "
                "of all workers are there. Take a tf.function decorator off (`fit` compiles the "
                'whole step), several steps as several batches, or use `mode="async"`. '
                f"Received: {optimizer.name}.apply(), called {where}"
            )
        self._check_unused(gradients, optimizer)
        overwritten = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
        if overwritten and self.engine.strategy.num_workers > 1:
            raise ValueError(
                'With `mode="sync"`, float8 is not supported: the parameter servers add up what '
                "workers send, and the scales of float8 are the largest of all workers. Use "
                'MultiWorkerMirroredStrategy, or `mode="async"`. '
                f"Received: {', '.join(overwritten[:3])}, of a model that is quantized to float8"
            )
        if self.first_hand_over is None:
            self.first_hand_over = len(self._graph.get_operations())
        parts = ((call.part_of(one) for call in self._calls) for one in gradients)
        found = [next((p for p in of_one if p is not None), None) for of_one in parts]
        # A gradient that no tape has returned is a mean over this share's rows, as its losses are.
        gradients = [
            map_values(self.scale_by_batch_fraction, g) if part is None else part
            for g, part in zip(gradients, found)
        ]
        self._optimizers.append(optimizer)
        self.handed_over.append(self._push(optimizer, gradients, variables))
        inner = unwrapped(optimizer)
        rate = getattr(inner, "_learning_rate", None)
        for variable in [*variables, *inner.variables, *optimizer.variables]:
            if variable is not rate:
                self._updated[id(variable._value)] = optimizer, variable

    def as_read(self, variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
        if id(variable) not in self._updated:
            return value
        optimizer, updated = self._updated[id(variable)]
        if updated is optimizer._iterations and unwrapped(optimizer) is optimizer:
            return value + 1
        self._refuse_read(optimizer, updated)
        return value

    def _check_calls(self) -> None:
        """Raises ValueError if a function, traced before, reads what is updated only later."""
        updated = [(one, parts_of(one[1]._value)) for one in self._updated.values()]
        # Servers' rows of dynamic tables have no handle.
        handles = {
            id(part.handle): one
            for one, parts in updated
            for part in parts
            if hasattr(part, "handle")
        }
        captured = {id(own): handles.get(id(outer)) for outer, own in self._graph.captures}
        for op in self._graph.get_operations()[self.first_hand_over :] if handles else ():
            for tensor in op.inputs if op.type in _CALLS else ():
                if (found := captured.get(id(tensor))) is not None:
                    self._refuse_read(*found)

    def _check_writes(self) -> None:
        """Raises ValueError if each worker would write to a variable on the servers."""
        written = pulls.written_by(self._graph.get_operations(), self._graph)
        shared = [handle for handle, _ in self._graph.captures if id(handle) in written]
        for handle in shared:
            strategy = self.engine.strategy
            variable = strategy.extended.by_handle.get(id(handle))
            # Others are of the rows of a dynamic table, which servers count once.
            if variable is None or strategy.num_workers == 1:
                continue
            raise ValueError(
                'With `mode="sync"`, several workers take each step together, and each would write '
                "to a variable on the parameter servers that is updated once in one process. Count "
                "in a metric, keep state in what a layer makes by `add_weight(trainable=False)`, "
                "of at most 65,536 elements, or write to it in a callback's "
                '`on_train_batch_end`; or use `mode="async"` or MultiWorkerMirroredStrategy. '
                f"Received: a `train_step` that writes to {path_of(variable)}"
            )

    def _refuse_read(self, optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> None:
        raise ValueError(
            'With `mode="sync"`, weights change once the gradients of all workers are there, so '
            "that a `train_step` which reads them after it has applied gradients would get those "
            "from before the step. Take the gradients of all optimizers before the first is "
            "applied, and move what needs the new weights, such as their moving averages, to a "
            "callback's `on_train_batch_end`; or use MultiWorkerMirroredStrategy, under which it "
            f"works. Received: {variable.path}, read after {optimizer.name}.apply()"
        )


class BatchSums:
    """Function of the chief for what a step `asked` for, of one share.

    Args:
        step: A `WorkerReplicaStep` that has been traced.
        given: The symbolic tensors of the share in its function.
        specs: Their type specifications, in the structure in which the share comes.
    """

    def __init__(self, step: WorkerReplicaStep, given: Sequence[tf.Tensor], specs: Any) -> None:
        self._given, self._part = list(given), Subgraph(step.asked, given)
        alone = [tensor for tensor in step.asked if not self._part.has(tensor)]
        self._constants = {tensor.ref(): tf.get_static_value(tensor) for tensor in alone}
        for tensor in alone:
            if self._constants[tensor.ref()] is None:
                _refuse_sum(f"by {tensor.op.type} ({tensor.op.name})")
        other = [t.op for t in self._part.inputs]
        for op in [*other, *(op for op in self._part.operations if op.op_def.is_stateful)]:
            _refuse_sum(f"with what {op.type} ({op.name}) returns")
        origin = tf.function(self._compute, autograph=False)
        with tf.device(worker_function.CHIEF):
            # TensorFlow holds what it was traced from weakly.
            self._concrete, self._origin = origin.get_concrete_function(specs), origin

    def __call__(self, share: Any) -> np.ndarray:
        with tf.device(worker_function.CHIEF):
            return self._concrete(share).numpy()

    def _compute(self, share: Any) -> tf.Tensor:
        flat = tf.nest.flatten(share, expand_composites=True)
        values = {one.ref(): value for one, value in zip(self._given, flat, strict=True)}
        found = self._part.repeat(values | self._constants, "sums")
        return tf.stack([tf.cast(one, tf.float64) for one in found])


def _refuse_sum(how: str) -> None:
    raise ValueError(
        'With `mode="sync"`, a loss divides by the entries that a mask leaves in the whole batch, '
        "or by the sum of its sample weights, which the chief computes before the workers begin: "
        "they follow from the batch alone, and are taken by the `train_step` itself. Make the mask "
        "from the inputs, as Embedding(mask_zero=True) and Masking on inputs do, leave "
        "`jit_compile=True` out, or use MultiWorkerMirroredStrategy, under which it works. "
        f"Received: a mask or weights that are computed {how}"
    )
