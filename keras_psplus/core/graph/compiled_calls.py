"""Models' calls that XLA compiles, with their gradients.

    batch ─► [ model ] ─► loss ─► tape ─► [ gradients of the model ] ─► collectives, optimizer
             compiled                       compiled

What talks to other replicas cannot be compiled, on CPUs at least, and sums of gradients would wait
for the last of them. So only the call of a model in the step is one compiled function; its
gradient is one too, as TensorFlow compiles the gradient of what it compiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base.thread_flag import ThreadFlag
from keras_psplus.core.graph import xla_operations
from keras_psplus.keras_internals.keras_parts import get_keras_mask, set_keras_mask, tree
from keras_psplus.log import logger

_LISTED = 3


@contextlib.contextmanager
def without_compilation(model: keras.Model) -> Iterator[None]:
    """Context in which Keras makes functions of a model without XLA."""
    compiles, model.jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model.jit_compile = compiles


class CompiledCalls:
    """Compiles the outermost calls of models in one function of a model.

    Args:
        model: The model that was compiled with `jit_compile`.
        is_asked_for: Whether by `jit_compile=True`, and not by default.

    Attributes:
        count: Number of calls that are compiled.
        reasons: Reasons why others are not, in words.
    """

    def __init__(self, model: keras.Model, is_asked_for: bool) -> None:
        self._model, self._is_asked_for = model, is_asked_for
        self._is_inside = ThreadFlag()
        self.count = 0
        self.reasons: list[str] = []

    def takes(self, layer: keras.Layer) -> bool:
        """Whether a call of a layer is to be compiled."""
        return isinstance(layer, keras.Model) and not self._is_inside and not tf.executing_eagerly()

    def call(
        self, original: Callable[..., Any], layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a layer in a compiled function, if XLA can compile the call.

        Args:
            original: Function of the layer and its arguments that calls it.
            layer: The layer.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            Outputs of the layer.
        """
        with self._is_inside.raised():
            call = _Call(original, layer, args, kwargs)
            reason = call.why_not()
            if reason is not None:
                self._note(f"the call of '{layer.name}': {reason}")
                return original(layer, *args, **kwargs)
            self.count += 1
            return call.outputs()

    def _note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            logger.info("not compiled in '%s': %s", self._model.name, reason)

    def check(self) -> None:
        """Raises ValueError if XLA was asked for, and a traced step has nothing compiled."""
        if self._is_asked_for and self.count == 0 and not tf.executing_eagerly():
            reasons = "; ".join(self.reasons) or "the step calls no model"
            raise ValueError(
                "`jit_compile=True` compiles the calls of models in the step, and there is none "
                f"that XLA can compile: {reasons}. Leave the default, `jit_compile='auto'`. "
                f"Received: jit_compile=True for the model '{self._model.name}'"
            )


class _Call:
    """One call of a layer as a function of tensors.

    Keras hangs masks on tensors and losses on layers: both go into the function, and leave it, with
    the tensors.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        layer: keras.Layer,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._original, self._layer, self._given = original, layer, (args, kwargs)
        self._flat = tree.flatten(self._given)
        self._places = [i for i, one in enumerate(self._flat) if tf.is_tensor(one)]
        self._tensors = [self._flat[i] for i in self._places]
        # Found by the trace: the structure of outputs, and layers by their losses.
        self._structure: Any = None
        self._owners: list[tuple[keras.Layer, int]] = []
        self._function = tf.function(self._run, autograph=False, jit_compile=True)

    def why_not(self) -> str | None:
        """The reason why XLA cannot compile the call, or None."""
        if not all(isinstance(one, tf.Tensor) for one in self._tensors):
            return "its inputs are ragged or sparse"
        if any(one.dtype == tf.string for one in self._tensors):
            return "its inputs are strings"
        graph = self._function.get_concrete_function(*self._inputs()).graph
        missing = xla_operations.missing(graph)
        return "XLA cannot compile its " + ", ".join(missing[:_LISTED]) if missing else None

    def outputs(self) -> Any:
        """Calls the function; returns the layer's outputs."""
        outputs, masks, added = self._function(*self._inputs())
        for output, mask in zip(outputs, masks):
            if mask is not None:
                set_keras_mask(output, mask)
        losses = iter(added)
        for layer, count in self._owners:
            layer._losses[:] = [next(losses) for _ in range(count)]
        return tree.pack_sequence_as(self._structure, outputs)

    def _inputs(self) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
        return self._tensors, [get_keras_mask(one) for one in self._tensors]

    def _run(
        self, tensors: Sequence[tf.Tensor], masks: Sequence[tf.Tensor | None]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor | None], list[tf.Tensor]]:
        flat = list(self._flat)
        for i, tensor, mask in zip(self._places, tensors, masks):
            flat[i] = tensor
            if mask is not None:
                set_keras_mask(tensor, mask)
        args, kwargs = tree.pack_sequence_as(self._given, flat)
        self._structure = self._original(self._layer, *args, **kwargs)
        outputs = tree.flatten(self._structure)
        layers = list(self._layer._flatten_layers())
        self._owners = [(layer, len(layer._losses)) for layer in layers if layer._losses]
        added = [loss for layer, _ in self._owners for loss in layer._losses]
        return outputs, [get_keras_mask(output) for output in outputs], added
