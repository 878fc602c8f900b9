"""Gradients of a custom training step, which are those of the global batch.

A replica's tape knows the replica's part of a gradient only. Summed there and then, it would be
sent before the optimizer could accumulate or compress it. So the tape gives a stand-in for each
gradient, and its optimizer finds out what has become of it:

- It is the stand-in itself, and nothing else has used that: the replica's part goes to the
  optimizer, which sums as late as it can. No operation is added to the graph.
- The step has computed with it (clipped, normalised, logged, perturbed weights by it, kept it in a
  variable): the parts of that call of the tape are summed before, and the sums put in the
  stand-ins' place. What the optimizer is given is then the same on all replicas, and is applied as
  it is.
- It is anything else: read from a variable, derived by hand from the replica's rows, returned by a
  function. It is averaged over the replicas, each of which counts by its rows: a value that is the
  same everywhere stays what it is, and a mean over rows becomes that of the global batch.

The first use may come after the optimizer's, as in logs, or there may be no optimizer: that is
found before the next collective, and at the step's end; in a function or a branch, at its end.
A loop may turn another number of times on each replica, and what is left in it without an optimizer
stays the replica's: there, a gradient is that of the mean over the replica's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import tensorflow as tf

from keras_psplus.core.graph import stand_ins
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.keras_internals.keras_parts import Variable
from keras_psplus.tf_internals.trace_end import call_at_end
from keras_psplus.updates import map_values

if TYPE_CHECKING:
    import keras


class Summed(NamedTuple):
    """Gradients that an optimizer is to apply.

    Attributes:
        grads: List of tensors, `tf.IndexedSlices` or None: parts of replicas, and global ones.
        whole: Set of numbers of those that are global gradients already.
    """

    grads: list[Gradient | None]
    whole: set[int]


class TapedStep(Protocol):
    """Replica's step, as its tape's gradients need it: a `MirroredReplicaStep`."""

    @property
    def graph(self) -> tf.Graph: ...

    @property
    def replicas(self) -> int: ...

    @property
    def has_batch_fraction(self) -> bool: ...

    def scale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor: ...

    def unscale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor: ...

    def zero_if_empty(self, tensors: list[Any]) -> list[Any]: ...


class SummingEngine(Protocol):
    """Engine that sums the gradients of its replicas: an `AllReduceEngine`."""

    @property
    def sums_eagerly(self) -> bool: ...

    def sum_parts(self, parts: Any, variables: Any, optimizer: Any) -> list[Any]: ...

    def on_padded_batch(self, batch: Any, padded: Any) -> None: ...


class TapeGradients:
    """The gradients that the tape has given in one replica's step.

    Args:
        sum_parts: Function of gradients, their Keras variables and an optimizer (None where there
            is none, or where its compressors cannot be used) that sums over the replicas.
        sums_eagerly: Whether eager gradients are summed at once. Otherwise compressors, or
            `updates=`, want the replicas' parts.
    """

    def __init__(
        self, step: TapedStep, sum_parts: Callable[..., Any], sums_eagerly: bool = True
    ) -> None:
        self._step, self._sum_parts, self._sums_eagerly = step, sum_parts, sums_eagerly
        self._calls: list[stand_ins.TapeCall] = []
        # Those that have left a loop, and are the replica's.
        self._of_loops: list[stand_ins.TapeCall] = []
        # Graphs of functions, branches and loops in which there are some of the calls.
        self._inner: list[tf.Graph] = []
        self._is_summing = False

    def note(
        self, grads: Sequence[Gradient | None], variables: Sequence[Any]
    ) -> list[Gradient | None]:
        """Stand-ins for the gradients of one call of the tape."""
        self.settle()
        call = stand_ins.TapeCall(grads, variables)
        self._calls.append(call)
        if tf.executing_eagerly() and self._sums_eagerly:
            # Nothing can be put in a tensor's place later.
            self._sum(call)
        graph = call.graph
        if graph not in (None, self._step.graph, *self._inner):
            self._inner.append(graph)
            call_at_end(graph, lambda outputs: self._end_inner(graph, outputs))
        return call.given

    def settle(self) -> None:
        """Sums what something has used by now; before collectives, and at the step's end."""
        if self._is_summing or tf.executing_eagerly():
            return
        for call in self._calls:
            if call.is_open and call.is_used() and not self._is_in_loop(call):
                self._sum(call)

    def _end_inner(self, graph: tf.Graph, outputs: Sequence[tf.Tensor]) -> None:
        """Settles what the trace of a function, a branch or a loop's body leaves behind."""
        for call in self._calls:
            if call.is_open and call.graph is graph and call.is_used(outputs):
                if self._is_in_loop(call):
                    unscale = self._step.unscale_by_batch_fraction
                    call.close([map_values(unscale, part) for part in call.parts])
                    self._of_loops.append(call)
                else:
                    self._sum(call)

    def _is_in_loop(self, call: stand_ins.TapeCall) -> bool:
        return bool(stand_ins.loops_around(call.graph, self._step.graph))

    def _check_loops(self, gradient: Gradient) -> None:
        """Refuses what is not linear in gradients that were taken, and left, in a loop."""
        for call in self._of_loops:
            bodies = stand_ins.loops_around(call.graph, self._step.graph)
            used_by = bodies and stand_ins.nonlinear_use(gradient, bodies, call.variables)
            if used_by:
                raise ValueError(
                    "Gradients that were taken in a loop of the graph are each replica's own when "
                    "they leave it, and the step computes with them what is no mean, such as a "
                    "norm. Clip and apply them in the loop, or make it a loop of Python's, as "
                    "`for _ in range(4):` is. "
                    f"Received: {used_by} of the gradients of {call.describe()}"
                )

    def take(
        self,
        grads: list[Gradient | None],
        optimizer: keras.optimizers.Optimizer | None,
        wants_parts: bool = False,
    ) -> Summed:
        """Resolves an optimizer's gradients to replicas' parts or global sums.

        Args:
            optimizer: The optimizer; None if its compressors cannot be used for this.
            wants_parts: Whether replicas' parts are wanted even where there are sums.

        Raises:
            ValueError: If gradients were changed where they cannot be summed before.
        """
        grads = [tf.convert_to_tensor(g) if _is_variable(g) else g for g in grads]
        if tf.executing_eagerly():
            return self._take_eagerly(grads, wants_parts)
        for call in self._calls:
            if call.is_open and (call.is_used() or any(call.has_made(one) for one in grads)):
                self._sum(call, optimizer)
        closed = [c for c in self._calls if not c.is_open and c not in self._of_loops]
        own: list[Gradient | None] = []
        whole: set[int] = set()
        for i, gradient in enumerate(grads):
            part = self._part_of(gradient)
            if part is None and gradient is not None:
                if stand_ins.is_made_of(closed, gradient):
                    part, whole = gradient, whole | {i}
                else:
                    self._check_loops(gradient)
                    part = self._part_of_mean(gradient)
            own.append(part)
        return Summed(own, whole)

    def _take_eagerly(self, grads: Sequence[Gradient | None], wants_parts: bool) -> Summed:
        parts = [self._part_of(gradient) for gradient in grads]
        changed = [i for i, part in enumerate(parts) if part is None and grads[i] is not None]
        is_eager = any(call.is_eager for call in self._calls)
        if is_eager and changed and not self._sums_eagerly:
            raise ValueError(
                "With `run_eagerly=True` and `compression` or `updates`, a `train_step` gives what "
                "`tape.gradient` returns to the optimizer as it is: the sum over the replicas "
                "cannot be put in its place. Use `run_eagerly=False`. "
                f"Received: {len(changed)} gradient(s) that the tape has not returned"
            )
        for i in changed:
            parts[i] = self._part_of_mean(grads[i])
        if wants_parts or not self._sums_eagerly or not is_eager:
            return Summed(parts, set())
        summed = [part if i in changed else g for i, (g, part) in enumerate(zip(grads, parts))]
        whole = {i for i, g in enumerate(grads) if g is not None and i not in changed}
        return Summed(summed, whole)

    def _part_of_mean(self, gradient: Gradient | None) -> Gradient | None:
        """A replica's part of the mean over the rows of all of them."""
        if not self._step.has_batch_fraction or self._step.replicas == 1:
            return gradient
        return map_values(self._step.scale_by_batch_fraction, gradient)

    def put_sums(self, variables: Sequence[Any], sums: Sequence[Gradient]) -> None:
        """Writes an optimizer's sums back to the stand-ins that it was called with."""
        for call in self._calls:
            if call.is_open:
                call.put_sums(variables, sums)

    def _part_of(self, gradient: Gradient | None) -> Gradient | None:
        """A replica's part, if a gradient is a stand-in for it that nothing has used."""
        for call in self._calls:
            if call.is_open or tf.executing_eagerly():
                part = call.part_of(gradient)
                if part is not None:
                    return part
        return None

    def _sum(
        self, call: stand_ins.TapeCall, optimizer: keras.optimizers.Optimizer | None = None
    ) -> None:
        outer, self._is_summing = self._is_summing, True
        try:
            with call.graph_context():
                parts = self._step.zero_if_empty(call.parts)
                call.close(self._sum_parts(parts, call.variables, optimizer))
        finally:
            self._is_summing = outer


def _is_variable(gradient: Any) -> bool:
    return isinstance(gradient, (Variable, tf.Variable))
