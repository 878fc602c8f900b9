"""Gradients of a custom training step, which are those of the global batch.

A replica's tape knows the replica's part of a gradient only. Summed there and then, it would be
sent before the optimizer could accumulate or compress it. So the tape gives a stand-in for each
gradient, and its optimizer finds out what has become of it:

- It is the stand-in itself, and nothing else has used that: the replica's part goes to the
  optimizer, which sums as late as it can. No operation is added to the graph.
- The step has computed with it (clipped, normalised, logged, perturbed weights by it): the parts
  of that call of the tape are summed before, and the sums put in the stand-ins' place. What the
  optimizer is given is then the same on all replicas, and is applied as it is.

The first use may come after the optimizer's, as in logs, or there may be no optimizer: that is
found before the next collective, and at the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_psplus.core import stand_ins

if TYPE_CHECKING:
    import keras

    from keras_psplus.all_reduce.replica_step import MirroredReplicaStep


class Summed(NamedTuple):
    """Gradients that an optimizer is to apply.

    Attributes:
        grads: List of tensors, `tf.IndexedSlices` or None: parts of replicas, and global ones.
        whole: Set of numbers of those that are global gradients already.
    """

    grads: list[tf.Tensor | tf.IndexedSlices | None]
    whole: set[int]


class TapeGradients:
    """The gradients that the tape has given in one replica's step.

    Args:
        step: `all_reduce.replica_step.MirroredReplicaStep`.
        sum_parts: Function of gradients, their Keras variables and an optimizer (None where there
            is none, or where its compressors cannot be used) that sums over the replicas.
        sums_eagerly: Whether eager gradients are summed at once. Otherwise compressors, or
            `updates=`, want the replicas' parts.
    """

    def __init__(
        self,
        step: MirroredReplicaStep,
        sum_parts: Callable[..., Any] | None,
        sums_eagerly: bool = True,
    ) -> None:
        self._step, self._sum_parts, self._sums_eagerly = step, sum_parts, sums_eagerly
        self._calls: list[stand_ins.Call] = []
        self._is_summing = False

    def note(
        self, grads: Sequence[tf.Tensor | tf.IndexedSlices | None], variables: Sequence[Any]
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Stand-ins for the gradients of one call of the tape.

        Args:
            grads: List of tensors, `tf.IndexedSlices` or None.
            variables: Their variables.

        Returns:
            List of the same form.
        """
        self.settle()
        call = stand_ins.Call(grads, variables)
        self._calls.append(call)
        if tf.executing_eagerly() and self._sums_eagerly:
            # Nothing can be put in a tensor's place later.
            self._sum(call)
        return call.given

    def settle(self) -> None:
        """Sums what something has used by now; before collectives, and at the step's end."""
        if self._is_summing or tf.executing_eagerly():
            return
        for call in self._calls:
            if call.is_open and call.is_used():
                self._sum(call)

    def end(self) -> None:
        """As `settle`, when the step has been traced.

        Raises:
            ValueError: If a `tf.function` inside it has used a gradient without applying it.
        """
        for call in self._calls:
            if call.is_open and not call.is_in(self._step.graph) and call.is_used_inside():
                raise ValueError(
                    "A gradient that `tape.gradient` has returned in a tf.function inside the step "
                    "was used there, and its sum over the replicas cannot be put in its place any "
                    "more. Take the tf.function decorator off: `fit` compiles the whole step. "
                    f"Received: the gradients of {call.describe()}"
                )
        self.settle()

    def take(
        self,
        grads: list[tf.Tensor | tf.IndexedSlices | None],
        optimizer: keras.optimizers.Optimizer | None,
        wants_parts: bool = False,
    ) -> Summed:
        """Resolves an optimizer's gradients to replicas' parts or global sums.

        Args:
            grads: List of tensors, `tf.IndexedSlices` or None.
            optimizer: The optimizer; None if its compressors cannot be used for this.
            wants_parts: Whether replicas' parts are wanted even where there are sums.

        Returns:
            `Summed`.

        Raises:
            ValueError: If gradients were changed where their sums cannot be put in their place.
        """
        self._refuse_changed_inside(grads)
        if tf.executing_eagerly():
            return self._take_eagerly(grads, wants_parts)
        for call in self._calls:
            if call.is_open and (call.is_used() or any(call.has_made(one) for one in grads)):
                self._sum(call, optimizer)
        own, whole = [], set()
        for i, gradient in enumerate(grads):
            part = self._part_of(gradient)
            if part is None and any(not c.is_open and c.leads_to(gradient) for c in self._calls):
                whole.add(i)
            own.append(gradient if part is None else part)
        return Summed(own, whole)

    def _take_eagerly(self, grads, wants_parts):
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
        if not self._sums_eagerly or not is_eager:
            return Summed([g if p is None else p for g, p in zip(grads, parts)], set())
        if wants_parts:
            return Summed([g if p is None else p for g, p in zip(grads, parts)], set(changed))
        return Summed(list(grads), {i for i, g in enumerate(grads) if g is not None})

    def put_sums(
        self, variables: Sequence[Any], sums: Sequence[tf.Tensor | tf.IndexedSlices]
    ) -> None:
        """Writes an optimizer's sums back to the stand-ins that it was called with."""
        for call in self._calls:
            if call.is_open:
                call.put_sums(variables, sums)

    def _part_of(self, gradient):
        """A replica's part, if a gradient is a stand-in for it that nothing has used."""
        for call in self._calls:
            if call.is_open or tf.executing_eagerly():
                part = call.part_of(gradient)
                if part is not None:
                    return part
        return None

    def _sum(self, call, optimizer=None):
        outer, self._is_summing = self._is_summing, True
        try:
            with call.graph_context():
                parts = self._step.zero_if_empty(call.parts)
                call.close(self._sum_parts(parts, call.variables, optimizer))
        finally:
            self._is_summing = outer

    def _refuse_changed_inside(self, grads):
        for call in self._calls:
            if call.is_open and any(call.was_changed_inside(one) for one in grads):
                raise ValueError(
                    "Gradients were changed in a tf.function inside the step and applied outside "
                    "of it: their sum over the replicas cannot be put in their place any more. "
                    "Take the tf.function decorator off: `fit` compiles the whole step. "
                    f"Received: the gradients of {call.describe()}"
                )
