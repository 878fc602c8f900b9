"""Delays gradients of weights until a stage's gradients of inputs are computed.

The previous stage waits for gradients of activations, and only the optimizer waits for gradients of
weights. A stage that computes both layer by layer sends the former later than it could.
Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, where the two parts of a
backward pass have separate places in the schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import tensorflow as tf

from keras_psplus.core.graph.subgraph import with_inputs


@dataclasses.dataclass
class BackwardOperations:
    """Operations of a worker's backward pass for one micro-batch.

    Attributes:
        operations: All operations.
        of_inputs: For each layer, in the order of the trace, the gradients by its inputs.
    """

    operations: list[tf.Operation] = dataclasses.field(default_factory=list)
    of_inputs: list[list[tf.Tensor]] = dataclasses.field(default_factory=list)

    def note(self, operations: list[tf.Operation], of_inputs: list[tf.Tensor]) -> None:
        """Notes what was traced for one layer."""
        self.operations += operations
        if of_inputs:
            self.of_inputs.append(of_inputs)


def delay(turns: Iterable[BackwardOperations]) -> None:
    """Lets gradients by weights begin when all gradients by inputs of their turn are there.

    Args:
        turns: For each worker and micro-batch, its operations, all of one graph.
    """
    for turn in turns:
        inside = set(turn.operations)
        last = _last(turn, inside)
        # All that these need, of other turns as well: none of it may wait for them.
        needed = with_inputs([tensor.op for tensor in last])
        for op in turn.operations:
            if op not in needed and _begins(op, inside, needed):
                for tensor in last:
                    op._add_control_input(tensor.op)


def _last(turn: BackwardOperations, inside: set[tf.Operation]) -> list[tf.Tensor]:
    """Gradients of inputs from which the turn computes no further gradients of inputs."""
    found = {id(tensor): tensor for tensor in turn.of_inputs[-1]} if turn.of_inputs else {}
    for tensors in turn.of_inputs:
        for tensor in tensors:
            if any(op not in inside for op in tensor.consumers()):
                found[id(tensor)] = tensor
    return list(found.values())


def _begins(op: tf.Operation, inside: set[tf.Operation], needed: Collection[tf.Operation]) -> bool:
    """Whether an operation is given something, and nothing by those that wait for it."""
    givers = [tensor.op for tensor in op.inputs]
    return bool(givers) and all(giver in needed or giver not in inside for giver in givers)
