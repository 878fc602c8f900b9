"""Calls of layers on the devices of their stages: operations, gradients, recomputation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.graph.compiled_calls import CompiledFunction
from keras_psplus.core.graph.subgraph import with_inputs
from keras_psplus.keras_internals.keras_parts import (
    get_keras_mask,
    global_state,
    set_keras_mask,
    tree,
)
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import record, resource_variable_ops
from keras_psplus.updates.base import numbers_of

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


class JoinedCalls:
    """The calls of a layer for all micro-batches, whose gradients are computed in turn.

    A tape by itself would compute the gradients of each layer for all micro-batches, and then those
    of the layer before, so that no stage could begin before the one after it has ended. `total`
    maps the variables that the calls have used to those that gradients are asked for by, and a
    function of gradients by the former that returns those by the latter.
    """

    def __init__(self, total: Callable[..., Any] | None = None) -> None:
        self._total = total or (lambda variables: (variables, lambda sums: sums))
        self._calls: list[tuple[tf.GradientTape, list[tf.Tensor], Any]] = []

    def call(self, function: Callable[[], Any], inputs: Any) -> Any:
        given = differentiable(inputs)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(given)
            outputs = function()
        self._calls.append((tape, given, outputs))
        return outputs

    def join(self, join: Callable[[list[Any]], Any], sizes: list[int]) -> Any:
        """Joins the outputs of all micro-batches."""
        with record.stop_recording():
            joined = join([outputs for _, _, outputs in self._calls])
        if any(isinstance(leaf, _COMPOSITE) for leaf in tree.flatten(joined)) and len(sizes) > 1:
            raise ValueError(
                "A pipeline's model must return dense tensors: those of micro-batches are joined, "
                "and gradients cut, by rows. Convert what it returns (`to_tensor()`, "
                "`tf.sparse.to_dense`), or pass `microbatches=1` to the strategy. "
                f"Received: {joined}"
            )
        outside = [leaf for leaf in tree.flatten(joined) if _has_gradient(leaf)]
        if not outside:
            return joined
        variables = _unique(v for tape, _, _ in self._calls for v in tape.watched_variables())
        inputs = [tensor for _, given, _ in self._calls for tensor in given]
        asked_for, total = self._total(variables)

        def gradients(*of_joined: Any) -> list[Any]:
            of_inputs, sums, first = [], [None] * len(variables), 0
            for (tape, given, outputs), size in zip(self._calls, sizes):
                inside = [leaf for leaf in tree.flatten(outputs) if _has_gradient(leaf)]
                own = list(of_joined)
                if len(sizes) > 1:
                    own = [_rows(gradient, first, size) for gradient in of_joined]
                found = tape.gradient(inside, [*given, *variables], output_gradients=own)
                of_inputs += found[: len(given)]
                sums = [add(a, b) for a, b in zip(sums, found[len(given) :])]
                first += size
            return [*of_inputs, *total(sums)]

        handles = [variable.handle for variable in asked_for]
        record.record_operation("PipelineModel", outside, [*inputs, *handles], gradients)
        return joined


def differentiable(structure: Any) -> list[tf.Tensor]:
    """The tensors of a structure that can have gradients, each once."""
    return _unique(leaf for leaf in tree.flatten(structure) if _has_gradient(leaf))


def add(total: Any, gradient: Any) -> Any:
    """Adds a gradient to a sum of gradients; either may be None, or `tf.IndexedSlices`."""
    if total is None or gradient is None:
        return gradient if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return duplicate_rows.joined(total, gradient)
    added = tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
    # TensorFlow makes one sum of sums, with all micro-batches' gradients in memory at once, but
    # not across a change of shape.
    return tf.squeeze(tf.expand_dims(added, 0), 0)


def as_rows_of(tensor: Any, rows: Any, before: int, after: int) -> Any:
    """Rows of a tensor that came by themselves, with gradients by the tensor."""
    if not _has_gradient(tensor):
        return rows
    with record.stop_recording():
        same = tf.identity(rows)

    def gradient(of_rows: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor]:
        others = [[0, 0]] * (rows.shape.rank - 1)
        return [tf.pad(tf.convert_to_tensor(of_rows), [[before, after], *others])]

    record.record_operation("RowsOfBatch", [same], [tensor], gradient)
    return same


def _rows(tensor: tf.Tensor, first: int, count: int) -> tf.Tensor:
    rows = tensor[first : first + count]
    # TensorFlow may not know how many rows the batch has.
    rows.set_shape([count, *rows.shape[1:]])
    return rows


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)


def _unique(found: Iterable[Any]) -> list[Any]:
    return list({id(one): one for one in found}.values())


# Operations that do not change a variable.
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


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
    function's own device, by its own tape. `forward`, and what `backward` returns, are contexts
    that are told what they begin with, and what they end with: the tensors computed last, and those
    that other stages may need.
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
            for own, one in zip(inputs, found):
                if isinstance(one, tf.Tensor):
                    # A loss that does not know its rows has gradients that do not either.
                    one.set_shape(own.shape)
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

    Where several tapes record a compiled call, TensorFlow prepares for gradients of gradients: the
    function would compute its own gradients, too, each time that it is called.
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
        return self._variables

    def gradient(
        self, outputs: Sequence[tf.Tensor], sources: Sequence[Any], output_gradients: Sequence[Any]
    ) -> list[Any]:
        """Gradients of the call by its arguments, which nothing but the call uses."""
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
    """Operations of a worker's backward pass for a micro-batch, in the trace's order."""

    operations: list[tf.Operation] = dataclasses.field(default_factory=list)
    of_inputs: list[list[tf.Tensor]] = dataclasses.field(default_factory=list)

    def note(self, operations: list[tf.Operation], of_inputs: list[tf.Tensor]) -> None:
        self.operations += operations
        if of_inputs:
            self.of_inputs.append(of_inputs)


def delay(turns: Iterable[BackwardOperations]) -> None:
    """Lets gradients by weights begin when a turn's gradients by inputs are there."""
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


# Activation recomputation: a stage recomputes activations in the backward pass.
#
# Between the two passes of a micro-batch, memory holds only the inputs that its layers received
# from other stages or from between the layers. References: Chen et al., "Training Deep Nets with
# Sublinear Memory Cost", 2016; Huang et al., "GPipe", NeurIPS 2019, section 2.3.


_CALL_CONTEXT = "current_call_ctx"
# Operations with a state, beside reads, that may be done twice.
_CONTROL_FLOW = ("While", "If", "Case", "Assert")


@dataclasses.dataclass
class _Call:
    """One call of a layer, in Keras's context, with its seeds."""

    layer: keras.Layer
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    context: Any
    seeds: list[tf.Tensor] = dataclasses.field(default_factory=list)
    outputs: list[tf.Tensor] = dataclasses.field(default_factory=list)


class StageReplay:
    def __init__(self) -> None:
        self._calls: list[_Call] = []
        # Replacements of outputs and other inputs, by their ids; and results of calls by theirs.
        self._found: dict[int, tf.Tensor] = {}
        self._results: dict[int, tuple[tf.GradientTape, list[tf.Tensor], list[tf.Tensor]]] = {}
        self._noted: _Call | None = None
        # The last call, if it can be repeated.
        self._last: _Call | None = None
        self._seeds: Iterator[tf.Tensor] | None = None

    @property
    def is_replaying(self) -> bool:
        return self._seeds is not None

    def call(
        self,
        layer: keras.Layer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a layer for the first time, and records the call for its recomputation."""
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        context = global_state.get_global_attribute(_CALL_CONTEXT)
        self._noted = call = _Call(layer, function, args, kwargs, context)
        try:
            outputs = function(*args, **kwargs)
        finally:
            self._noted = None
        repeats = _can_be_repeated(layer, graph, graph.get_operations()[before:])
        self._last = call if repeats else None
        return outputs

    def note_outputs(self, outside: list[tf.Tensor]) -> Any:
        """Notes the last call's outputs; returns the call, if it can be repeated."""
        if self._last is not None:
            self._last.outputs = outside
            self._calls.append(self._last)
        return self._last

    def next_seed(self, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """A seed of a layer: the same for both calls."""
        if self._seeds is not None:
            return next(self._seeds)
        seed = draw()
        if self._noted is not None:
            self._noted.seeds.append(seed)
        return seed

    def again(
        self, call: Any, gradients: list[tf.Tensor]
    ) -> tuple[tf.GradientTape, list[tf.Tensor], list[tf.Tensor]]:
        """Calls the stage's layers once more; returns a tape, outputs and inputs."""
        if not self._results:
            with tf.control_dependencies([one for one in gradients if one is not None]):
                for one in self._calls:
                    self._repeat(one)
        return self._results[id(call)]

    def _repeat(self, call: _Call) -> None:
        args, kwargs = tree.map_structure(self._input, (call.args, call.kwargs))
        inputs = differentiable((args, kwargs))
        self._seeds = iter(call.seeds)
        try:
            with _as_before(call), tf.GradientTape(persistent=True) as tape:
                tape.watch(inputs)
                outputs = call.function(*args, **kwargs)
        finally:
            self._seeds = None
        inside = differentiable(outputs)
        self._found.update({id(old): new for old, new in zip(call.outputs, inside)})
        self._results[id(call)] = tape, inside, inputs

    def _input(self, leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return leaf
        if id(leaf) not in self._found:
            # Another tensor: TensorFlow would find that the layer was called with this one before.
            self._found[id(leaf)] = tf.identity(leaf)
        return _masked_as(leaf, self._found[id(leaf)])


@contextlib.contextmanager
def _as_before(call: _Call) -> Iterator[None]:
    """Context in which Keras repeats a layer's call without recording its losses again."""
    layers = list(call.layer._flatten_layers())
    counts = [len(layer._losses) for layer in layers]
    outer = global_state.get_global_attribute(_CALL_CONTEXT)
    global_state.set_global_attribute(_CALL_CONTEXT, call.context)
    try:
        yield
    finally:
        global_state.set_global_attribute(_CALL_CONTEXT, outer)
        for layer, count in zip(layers, counts):
            del layer._losses[count:]


def _can_be_repeated(layer: keras.Layer, graph: tf.Graph, operations: list[tf.Operation]) -> bool:
    """Whether a call changes no state but that which `StageReplay` handles."""
    layers = list(layer._flatten_layers())
    states = [generator.state for one in layers for generator in one._seed_generators]
    for one in layers:
        if isinstance(one, keras.layers.BatchNormalization):
            # In training it reads them for nothing but their next values.
            states += [v for v in one.non_trainable_variables if v is not None]
    known = {id(state._value.handle) for state in states}
    changed = {id(inside) for outside, inside in graph.captures if id(outside) in known}
    return all(
        not op._is_stateful
        or op.type in (*READS, *_CONTROL_FLOW)
        or (op.type.startswith("Assign") and id(op.inputs[0]) in changed)
        for op in operations
    )
