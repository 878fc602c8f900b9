"""Calls of layers in a step: by rules for cut weights, or with gathered ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.graph.variables import record_read
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import get_keras_mask, set_keras_mask, tree
from keras_psplus.sharding.units import function_here, given_by_calls, reaches
from keras_psplus.tensor_parallel import rules
from keras_psplus.tensor_parallel.group import (
    ModelGroup,
    Regions,
    is_elementwise,
    is_vectorized,
    local_part_of,
    part_of,
)
from keras_psplus.tensor_parallel.mesh_row import own_rule_for
from keras_psplus.tensor_parallel.variable import CutWeight, cut_of
from keras_psplus.tf_internals import framework_ops, resource_variable_ops

# Layers that call inner ones in loops of the graph, before which all of their weights are gathered.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)
# Layers without weights that compute each element from the same one of their input.
_ELEMENTWISE = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU, keras.layers.Identity)


class LayerCalls:
    """Calls the layers of a strategy's steps.

    Args:
        note: Function that is called where a layer talks to other workers.
    """

    def __init__(self, group: ModelGroup, note: Callable[[], None]) -> None:
        self._group, self._note, self.regions = group, note, Regions()
        # The layer that is being called with cut weights, and may be compiled all the same.
        self.compiled: Any = None
        # Wholes that the layers being called have gathered, by ids of weights.
        self._wholes: dict[int, tf.Tensor] = {}
        # Graph of the outermost layer that is being called.
        self._home: Any = None
        # Paths of weights that were gathered for a layer.
        self.gathered: set[str] = set()

    def read(self, weight: CutWeight) -> tf.Tensor:
        """The whole of a weight: as its layer has gathered it, or gathered now."""
        # `keras.remat` has to know which variables are read, also those gathered before.
        resource_variable_ops.variable_accessed(weight)
        given = given_by_calls(weight)
        if given is not None:
            # For a tape of the function's own, the gradient is whole.
            record_read(weight, given)
            return given
        found = self._wholes.get(id(weight))
        return self._gather(weight) if found is None or not reaches(found.graph) else found

    def _gather(self, weight: CutWeight) -> tf.Tensor:
        self.gathered.add(weight.path)
        return self._group.stack(weight.local(is_kept=True), weight.cut.axis)

    def call(self, call: Call, proceed: Callable[[Call], Any]) -> Any:
        if tf.executing_eagerly() or self.regions.are_whole:
            return proceed(call)
        if self._home is None:
            self._home = framework_ops.get_default_graph()
            try:
                return self._call(call, proceed)
            finally:
                self._home = None
        is_compiled = not self.regions.are_local and function_here() is not None
        if not is_compiled and _is_in_loop_or_branch(self._home):
            return self._call_with_wholes(call, proceed, within=True)
        return self._call(call, proceed)

    def _call(self, call: Call, proceed: Callable[[Call], Any]) -> Any:
        layer = call.owner
        if not self.regions.are_local and function_here() is not None:
            # XLA compiles what calls it: rules would talk to other workers there.
            return proceed(call)
        rule = None if self.regions.are_local else own_rule_for(layer, self._group)
        rule = rule or rules.contraction_rule_for(layer, self._group, self.regions)
        rule = rule or rules.embedding_rule_for(layer, self._group, self.regions)
        if rule is not None and not self.regions.are_local:
            self._note()
        rule = rule or self._elementwise_rule(layer)
        if rule is not None:
            with _calling(layer, rule):
                return proceed(call)
        given = rules.by_heads(layer, call.args, call.kwargs)
        if given is not None:
            return self._call_by_heads(call, given, proceed)
        return self._call_with_wholes(call, proceed)

    def _call_by_heads(
        self, call: Call, given: Sequence[tf.Tensor], proceed: Callable[[Call], Any]
    ) -> Any:
        """Calls an attention layer, between the sum of its inputs' gradients and that of heads.

        Args:
            given: What all heads attend from and to.
        """
        layer, group = call.owner, self._group
        entered = {id(one): (one, group.enter(one)) for one in given}
        for whole, one in entered.values():
            set_keras_mask(one, get_keras_mask(whole))
        args, kwargs = tree.map_structure(
            lambda leaf: entered[id(leaf)][1] if id(leaf) in entered else leaf,
            (call.args, call.kwargs),
        )
        outer, self.compiled = self.compiled, layer if rules.is_local(layer) else None
        if self.compiled is None:
            self._note()
        try:
            with self.regions.local():
                partial = proceed(dataclasses.replace(call, args=args, kwargs=kwargs))
        finally:
            self.compiled = outer
        for whole, one in entered.values():
            # Keras takes some masks away.
            if get_keras_mask(one) is None:
                set_keras_mask(whole, None)
        outputs = rules.sum_of(layer._output_dense, partial, group)
        set_keras_mask(outputs, get_keras_mask(partial))
        return outputs

    def _call_with_wholes(
        self, call: Call, proceed: Callable[[Call], Any], within: bool = False
    ) -> Any:
        """Calls a layer, and those inside of one that loops, with gathered weights.

        Args:
            within: Whether it is called in a loop or a branch, before which weights are gathered.
        """
        layer, loops = call.owner, within or isinstance(call.owner, _LOOPS)
        variables = layer.variables if loops else layer._trainable_variables
        weights = {id(v._value): v._value for v in variables if cut_of(v) is not None}
        if not weights:
            return proceed(call)
        self._note()
        outer = self._wholes
        with _before_loops(self._home) if within else contextlib.nullcontext():
            self._wholes = outer | {number: self._gather(one) for number, one in weights.items()}
        try:
            with self.regions.whole() if loops else contextlib.nullcontext():
                return proceed(call)
        finally:
            self._wholes = outer

    def _elementwise_rule(self, layer: Any) -> Callable[..., Any] | None:
        """Call of a layer without weights, on the local part of its input."""
        is_known = isinstance(layer, _ELEMENTWISE) and type(layer) in _ELEMENTWISE
        is_activation = type(layer) is keras.layers.Activation
        if not (is_known or is_activation and is_elementwise(layer.activation)):
            return None

        def call(inputs: Any) -> Any:
            found = local_part_of(inputs)
            if found is None:
                return type(layer).call(layer, inputs)
            assert part_of(inputs, found.axis) is not None
            return self._group.stack(type(layer).call(layer, found.tensor), found.axis)

        return call


def _is_in_loop_or_branch(home: Any) -> bool:
    """Whether a graph's loop or branch is traced, or a loop that TensorFlow vectorizes."""
    graph = framework_ops.get_default_graph()
    return is_vectorized() or graph is not home and reaches(home)


@contextlib.contextmanager
def _before_loops(home: Any) -> Iterator[None]:
    """Context in which operations belong to a graph itself, and to none of its loops."""
    with home.as_default(), tf.name_scope(""):
        yield


@contextlib.contextmanager
def _calling(layer: Any, rule: Callable[..., Any]) -> Iterator[None]:
    """Context in which a rule takes the place of a layer's `call`."""
    attributes = vars(layer)
    outer = attributes.get("call")
    attributes["call"] = rule
    try:
        yield
    finally:
        if outer is None:
            del attributes["call"]
        else:
            attributes["call"] = outer
