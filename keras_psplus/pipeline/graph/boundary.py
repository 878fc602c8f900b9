"""Runs a layer on a device: its operations, and those of its gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.core.graph.compiled_calls import CompiledFunction
from keras_psplus.core.graph.subgraph import with_inputs
from keras_psplus.keras_internals.keras_parts import get_keras_mask, set_keras_mask, tree
from keras_psplus.pipeline.base.gradients import differentiable
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import record, resource_variable_ops
from keras_psplus.updates.base import numbers_of


def call(
    device: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    forward: Any,
    backward: Callable[[], Any],
    replay: Any = None,
    compiled: CompiledFunction | None = None,
) -> Any:
    """Calls a function on a device.

    A tape alone would leave the operations of gradients to the device on which it is asked for
    them. So what the function does is recorded as one operation, whose gradient is computed on the
    function's own device, by its own tape.

    Args:
        forward: Context in which the function is called. It has a method `begins_with` for what it
            is called with, and `ends_with` for the tensors that are computed last, and for those
            that other stages may need.
        backward: Function of no arguments that returns such a context, in which gradients are
            computed.
        replay: `recompute.StageReplay`, if the function is called once more for its gradients.
        compiled: The function, compiled by XLA, if it is to be called in its place.
    """
    outer = differentiable((args, kwargs))
    tape: Any = tf.GradientTape(persistent=True)
    if compiled is not None:
        function, tape = compiled, _CallGradients(compiled.variables)
        with record.stop_recording(), ops.device(device):
            args, kwargs = _copied((args, kwargs))
    inputs = differentiable((args, kwargs))
    forward.begins_with((args, kwargs))
    with ops.device(device), forward, tape:
        tape.watch(inputs)
        outputs = function(*args, **kwargs)
    # No tape has seen the losses that layers have added in it.
    losses = [] if compiled is None else compiled.losses
    inside = differentiable((outputs, losses))
    if not inside:
        return outputs
    with record.stop_recording(), ops.device(device):
        outside = [_masked_as(tensor, tf.identity(tensor)) for tensor in inside]
    forward.ends_with(outside, outside[: len(inside) - len(losses)])
    repeated = None if replay is None else replay.note_outputs(outside)
    variables = tape.watched_variables()
    sources = [*inputs, *variables]

    def gradients(*of_outputs: Any) -> list[Any]:
        context = backward()
        context.begins_with(of_outputs)
        with ops.device(device), context:
            if repeated is None:
                found = tape.gradient(inside, sources, output_gradients=list(of_outputs))
            else:
                again, results, given = replay.again(repeated, of_outputs)
                found = again.gradient(
                    results, [*given, *variables], output_gradients=list(of_outputs)
                )
            of_inputs = [one for one in found[: len(inputs)] if one is not None]
            # Nobody needs gradients by the batch itself: they must not be waited for.
            last = numbers_of(one for one in found[len(inputs) :] if one is not None) or of_inputs
            context.ends_with(last, of_inputs)
        return found

    handles = [variable.handle for variable in variables]
    record.record_operation("PipelineStage", outside, [*outer, *handles], gradients)
    pairs = {id(old): new for old, new in zip(inside, outside)}
    if compiled is not None:
        compiled.replace_losses(pairs)
    return tree.map_structure(lambda leaf: pairs.get(id(leaf), leaf), outputs)


def _copied(structure: Any) -> Any:
    """Copies of the tensors of a structure; one of a tensor that is there twice."""
    tensors = {id(leaf): leaf for leaf in tree.flatten(structure) if isinstance(leaf, tf.Tensor)}
    copies = {key: _masked_as(leaf, tf.identity(leaf)) for key, leaf in tensors.items()}
    return tree.map_structure(lambda leaf: copies.get(id(leaf), leaf), structure)


def _masked_as(tensor: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    mask = get_keras_mask(tensor)
    if mask is not None:
        set_keras_mask(other, mask)
    return other


class _CallGradients:
    """Context of a call that no tape records, with the methods of one.

    Where several tapes record a call that is compiled, TensorFlow prepares for gradients of
    gradients: the function would compute its own gradients, too, each time that it is called.
    """

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        self._variables = [one for one in variables if one.trainable]
        self._stopped = contextlib.ExitStack()

    def __enter__(self) -> _CallGradients:
        self._stopped.enter_context(record.stop_recording())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stopped.close()
        for variable in self._variables:
            # Tapes outside ask for gradients by what they have seen read.
            resource_variable_ops.variable_accessed(variable)

    def watch(self, tensors: Sequence[tf.Tensor]) -> None:
        """Does nothing: gradients by all arguments can be computed."""

    def watched_variables(self) -> Sequence[tf.Variable]:
        """The trainable variables that the function reads."""
        return self._variables

    def gradient(
        self, outputs: Sequence[tf.Tensor], sources: Sequence[Any], output_gradients: Sequence[Any]
    ) -> list[Any]:
        """Gradients of the call by its arguments, which nothing but the call uses.

        Args:
            output_gradients: Gradients by the outputs, or None.
        """
        pairs = [(out, grad) for out, grad in zip(outputs, output_gradients) if grad is not None]
        if not pairs or not sources:
            return [None] * len(sources)
        found: list[Any] = tf.gradients(
            [out for out, _ in pairs],
            list(sources),
            grad_ys=[grad for _, grad in pairs],
            # Calls before this one may use its variables, too: these have their own gradients.
            stop_gradients=[one for one in sources if isinstance(one, tf.Tensor)],
        )
        return found


# Delays gradients of weights until a stage's gradients of inputs are computed.
#
# The previous stage waits for gradients of activations, and only the optimizer waits for gradients
# of weights. A stage that computes both layer by layer sends the former later than it could.
# Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, where the two parts of a
# backward pass have separate places in the schedule.


@dataclasses.dataclass
class BackwardOperations:
    """Operations of a worker's backward pass for one micro-batch.

    Attributes:
        of_inputs: For each layer, in the order of the trace, the gradients by its inputs.
    """

    operations: list[tf.Operation] = dataclasses.field(default_factory=list)
    of_inputs: list[list[tf.Tensor]] = dataclasses.field(default_factory=list)

    def note(self, operations: list[tf.Operation], of_inputs: list[tf.Tensor]) -> None:
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
