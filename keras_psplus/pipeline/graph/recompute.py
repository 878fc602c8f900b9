"""Activation recomputation: a stage recomputes activations in the backward pass.

Between the two passes of a micro-batch, memory holds only the inputs that its layers received from
other stages or from between the layers. References: Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016; Huang et al., "GPipe", NeurIPS 2019, section 2.3.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import (
    get_keras_mask,
    global_state,
    set_keras_mask,
    tree,
)
from keras_psplus.pipeline.base.gradients import differentiable
from keras_psplus.pipeline.graph.devices import READS

_CALL_CONTEXT = "current_call_ctx"
# What may be done twice, of operations with a state, beside reads.
_CONTROL_FLOW = ("While", "If", "Case", "Assert")


@dataclasses.dataclass
class _Call:
    """One call of a layer.

    Attributes:
        context: Keras's context of the call, which has `training`.
        seeds: What its seed generators have given.
        outputs: Those of its outputs that have gradients, as other layers were given them.
    """

    layer: keras.Layer
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    context: Any
    seeds: list[tf.Tensor] = dataclasses.field(default_factory=list)
    outputs: list[tf.Tensor] = dataclasses.field(default_factory=list)


class StageReplay:
    """The calls of a stage's layers for one micro-batch."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        # What replaces outputs and other inputs, by their ids; and results of calls by theirs.
        self._found: dict[int, tf.Tensor] = {}
        self._results: dict[int, tuple[tf.GradientTape, list[tf.Tensor], list[tf.Tensor]]] = {}
        self._noted: _Call | None = None
        # The last call, if it can be repeated.
        self._last: _Call | None = None
        self._seeds: Iterator[tf.Tensor] | None = None

    @property
    def is_replaying(self) -> bool:
        """Whether a layer is called once more just now."""
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
        """Notes the outputs of the last call.

        Args:
            outside: What other layers are given in the place of those that have gradients.

        Returns:
            What `again` is to be given; None if the call cannot be repeated.
        """
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
        """Calls all layers of the stage once more, when the first gradients are there.

        Args:
            gradients: Gradients by outputs of the call.

        Returns:
            A tape of the call, its outputs that have gradients, and its inputs, likewise.
        """
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
        """Returns the recomputed tensor for `leaf`, or `leaf` itself."""
        if not isinstance(leaf, tf.Tensor):
            return leaf
        if id(leaf) not in self._found:
            # Another tensor: TensorFlow would find that the layer was called with this one before.
            self._found[id(leaf)] = tf.identity(leaf)
        found, mask = self._found[id(leaf)], get_keras_mask(leaf)
        if mask is not None:
            set_keras_mask(found, mask)
        return found


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
    """Whether a layer's call can be repeated.

    It changes no state but that which `StageReplay` handles.
    """
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
