"""Whole tensors that a trace gathers at its end, if it uses them by then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals.trace_end import call_at_end


@dataclasses.dataclass(eq=False)
class LocalPart:
    """This worker's part of a whole tensor.

    Attributes:
        axis: Axis along which the whole is cut.
        has_loss: Whether a loss is computed of parts, and needs no whole.
    """

    tensor: tf.Tensor
    axis: int
    has_loss: bool = False


def part_of(whole: Any, axis: int) -> tf.Tensor | None:
    """The part along an axis that a whole tensor was gathered from, or None."""
    found = getattr(whole, "_local_part", None)
    return found.tensor if found is not None and found.axis == axis % whole.shape.rank else None


class LateGathers:
    """Wholes of one graph, each with what stands for it until the trace ends.

    Args:
        gather: Function of a part and an axis that returns the whole.
        note: Function that is called with a whole whose loss is computed of parts, and the name
            of an operation for which it is gathered all the same.
    """

    def __init__(
        self,
        graph: Any,
        gather: Callable[[tf.Tensor, int], tf.Tensor],
        note: Callable[[tf.Tensor, str], None],
    ) -> None:
        self._graph, self._gather, self._note = graph, gather, note
        # By operations that stand for wholes.
        self._waiting: dict[tf.Operation, tuple[tf.Tensor, LocalPart]] = {}
        # Last of all: other functions of the end may still use wholes.
        call_at_end(graph, lambda _: call_at_end(graph, self._end))

    def add(self, whole: tf.Tensor, stand_in: tf.Operation, part: LocalPart) -> None:
        """Adds a whole, what stands for it, and the part to gather it from."""
        self._waiting[stand_in] = whole, part

    def _end(self, outputs: Sequence[Any]) -> None:
        waiting, self._waiting = self._waiting, {}
        parts = {stand_in: part.tensor for stand_in, (_, part) in waiting.items()}
        used = _used(self._graph, outputs, parts)
        for stand_in, (whole, part) in waiting.items():
            if stand_in in used:
                if part.has_loss:
                    users = (op.name for op in whole.consumers() if op in used)
                    self._note(whole, next(users, whole.op.name))
                stand_in._update_input(0, self._gather(part.tensor, part.axis))


def _used(
    graph: Any, outputs: Sequence[Any], parts: dict[tf.Operation, tf.Tensor]
) -> set[tf.Operation]:
    """Operations of whose values the graph's outputs or its state depend.

    Args:
        parts: By operations that stand for wholes, parts on which these will depend.
    """
    pending = [op for op in graph.get_operations() if op.op_def.is_stateful]
    pending += [one.op for one in outputs if isinstance(one, tf.Tensor)]
    used: set[tf.Operation] = set()
    while pending:
        op = pending.pop()
        if op in used:
            continue
        used.add(op)
        if op in parts:
            pending.append(parts[op].op)
        # The shape of a whole is known without it.
        elif op.type != "Shape" or not _stands_for_whole(op.inputs[0], parts):
            pending.extend(one.op for one in op.inputs)
            pending.extend(op.control_inputs)
    return used


def _stands_for_whole(tensor: tf.Tensor, parts: dict[tf.Operation, tf.Tensor]) -> bool:
    while tensor.op.type in ("Identity", "IdentityN"):
        if tensor.op in parts:
            return True
        tensor = tensor.op.inputs[tensor.value_index]
    return False
