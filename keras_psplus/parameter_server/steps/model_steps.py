"""A model's step on a worker: its arguments, and calls compiled by XLA.

    servers ─► values ─► [ model ] ─► loss ─► tape ─► [ gradients ] ─► pushes ─► servers
                         compiled                      compiled

XLA cannot compile what is on another machine, so that weights are read before, and what the layers
assign is written after the call. Rows of embeddings are looked up outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.distributed_engine import DistributedEngine
from keras_psplus.core.graph.compiled_function import CompiledFunction
from keras_psplus.keras_internals.keras_parts import tree


def tensors(batch: Any) -> Any:
    """A batch as Keras's data adapters yield it, in tensors and without what is missing."""
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        return tf.convert_to_tensor(leaf)

    return tree.map_structure(convert, batch)


def next_batches(iterator: Iterator[Any], count: int) -> list[Any]:
    """The next batches of an iterator, as `tensors`; fewer at its end."""
    batches: list[Any] = []
    for _ in range(count):
        try:
            batches.append(tensors(next(iterator)))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return batches


def spec_of_tensors(element_spec: Any, batch: Any) -> Any:
    """A dataset's element specification in the form of `tensors`, if it describes a batch."""
    if element_spec is None:
        return None
    while isinstance(element_spec, tuple) and len(element_spec) > 1:
        if not isinstance(element_spec[-1], tf.OptionalSpec):
            break
        element_spec = element_spec[:-1]
    try:
        tf.nest.assert_same_structure(element_spec, batch, expand_composites=True)
    except (TypeError, ValueError):
        return None
    return element_spec


def weights(model: keras.Model) -> list[tf.Variable]:
    """TensorFlow's variables of a model's weights."""
    return [variable._value for variable in model.weights]


def compiled_step(
    engine: DistributedEngine, model: keras.Model, step_function: Callable[..., Any]
) -> Callable[..., Any]:
    """A step function whose calls of models are compiled, if the model is compiled so."""
    calls = engine.compiled_calls(model)
    if calls is None:
        return step_function

    @functools.wraps(step_function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with calls.of_this_thread(engine):
            result = step_function(*args, **kwargs)
        calls.check()
        return result

    return step


class ServedFunction(CompiledFunction):
    """A compiled function whose variables are on servers: it takes and returns their values."""

    def __init__(
        self,
        function: Callable[..., Any],
        layers: Callable[[], Iterable[keras.Layer]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        found = {id(one): one for layer in layers() for one in layer.variables}
        self._read, self._changed = list(found.values()), list[keras.Variable]()
        super().__init__(function, layers, args, kwargs)

    def why_not(self, device: str | None = None) -> str | None:
        if any(tensor.dtype in (tf.resource, tf.variant) for tensor in self.captured):
            return "it reads variables that are not its layers'"
        return super().why_not(device)

    def _inputs(self, flat: list[Any]) -> tuple[Any, ...]:
        return *super()._inputs(flat), [tf.convert_to_tensor(one._value) for one in self._read]

    def _run(self, tensors: Any, masks: Any, values: Any = ()) -> Any:
        pairs = list(zip(self._read, values))
        with keras.StatelessScope(pairs, collect_losses=True) as scope:
            given = [scope.get_current_value(one) for one in self._read]
            outputs, masks, added, _ = super()._run(tensors, masks)
            now = [scope.get_current_value(one) for one in self._read]
        changes = [(one, b) for one, a, b in zip(self._read, given, now) if a is not b]
        self._changed = [one for one, _ in changes]
        if scope.losses:
            self._owners = [*self._owners, (next(iter(self._layers())), len(scope.losses))]
        return outputs, masks, [*added, *scope.losses], [value for _, value in changes]

    def _write(self, changes: list[tf.Tensor]) -> None:
        for variable, value in zip(self._changed, changes):
            variable.assign(value)
