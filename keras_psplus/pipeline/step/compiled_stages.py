"""A stage's forward and backward pass of a micro-batch, compiled by XLA.

    stage 0: [ layers 1, 2, 3 ] ─► activations ─► stage 1: [ layers 4, 5 ] ─► loss
             compiled                                      compiled

Each function has a gradient, which is compiled too. All micro-batches of a pipeline use the same
functions, so that there are as many compilations as stages. What crosses stages, and the
optimizer's update, stay outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.graph import compiled_calls, subgraph
from keras_psplus.core.graph.compiled_calls import CompiledFunction
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import global_state
from keras_psplus.pipeline.base.stages import Stages


class _CutAgain(Exception):
    """Layers of a segment were found that XLA cannot compile."""


def compiled(
    calls: compiled_calls.CompiledCalls,
    device: str,
    function: Callable[..., Any],
    layers: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: Any,
) -> CompiledFunction | None:
    """Makes a compiled function of a call on a stage.

    Args:
        key: What calls of the same function have in common.
    """
    if calls.is_tracing or not compiled_calls.have_weights(layers):
        return None
    with tf.device(device):
        found = calls.function(function, layers, args, kwargs, (key, _training()), device)
    if found is None and len(layers) > 1 and not all(map(calls.is_compiled, layers)):
        raise _CutAgain
    return found


def run_graph(
    calls: compiled_calls.CompiledCalls,
    call: Call,
    stages: Stages,
    call_on_stage: Callable[..., Any],
) -> Any:
    """Runs the layers of a functional model, those of a stage in one call.

    Args:
        call_on_stage: `PipelineStep.call_on_stage`, of a step in a micro-batch.
    """
    run = call.get("operation_fn")

    def kind_of(operation: Any) -> Any:
        layers = operation._flatten_layers() if isinstance(operation, keras.Layer) else []
        stage = stages.of(operation) if isinstance(operation, keras.Layer) else None
        if stage is None and any(stages.of(layer) is not None for layer in layers):
            return None
        if not calls.is_compiled(operation):
            return None
        return subgraph.INHERITED if stage is None else stage

    def run_one(segment: subgraph.Segment, found: dict[int, Any]) -> bool:
        plain = functools.partial(compiled_calls.run_segment, segment, run)
        if segment.kind is None or not compiled_calls.have_weights(segment.operations):
            segment.run(found, plain)
            return True

        def on_stage(given: list[tf.Tensor]) -> Any:
            key = "segment", id(segment)
            return call_on_stage(segment.kind, plain, segment.operations, (given,), {}, key)

        try:
            segment.run(found, on_stage)
        except _CutAgain:
            return False
        return True

    return calls.run_segments(call, kind_of, run_one)


def _training() -> str:
    """Text of Keras's context of the traced call: above all, whether it trains."""
    context = global_state.get_global_attribute("current_call_ctx")
    return repr({k: v for k, v in vars(context).items() if k != "entry_layer"}) if context else ""
