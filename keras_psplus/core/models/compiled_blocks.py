"""Parts of models that `jit_blocks` has XLA compile one by one, each with its gradient.

    forward     [ part 0 ] ─► [ part 1 ] ─► [ part 2 ] ─► loss
    backward    [ part 2 ] ─► [ part 1 ] ─► [ part 0 ]
    buckets         └─ those of part 2  └─ of part 1  └─ of part 0

A compiled function returns all gradients at its end. Those of a part leave while the parts before
it are computed.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.graph.model_segments import nodes_in_order
from keras_psplus.core.models.units import is_unit
from keras_psplus.planning.contiguous_parts import contiguous_parts, part_numbers, summed


class CompiledBlocks:
    """Cuts calls of a model, and of models inside, into about equal parts.

    A functional or sequential model is cut between its layers. Of a model with a `call` of its own,
    each layer that it calls is a part.

    Args:
        model: The model that trains.
        number: Number of its parts.
        is_remote: Function of a layer that tells whether it talks to servers.
    """

    def __init__(
        self, model: keras.Model, number: int, is_remote: Callable[[keras.Layer], bool]
    ) -> None:
        self._model, self._number, self._is_remote = model, number, is_remote
        # Parts by ids of nodes, of graphs.
        self._parts: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        # Numbers of the compiled functions that gradients come from, by ids of variables.
        self._functions: dict[int, int] = {}

    @functools.cached_property
    def _whole(self) -> int:
        return self._bytes([self._model])

    def is_cut(self, operation: Any) -> bool:
        """Whether layers inside of an operation of a model are compiled by themselves."""
        if not isinstance(operation, keras.Layer) or is_unit(operation):
            return False
        return self._count(self._bytes([operation])) > 1

    def note_part(self, layers: Iterable[keras.Layer]) -> None:
        """Notes that some layers are one compiled function in the step that is being traced."""
        number = len(self._functions)
        for layer in layers:
            for one in layer._flatten_layers():
                for variable in one._trainable_variables:
                    # In backprop, a layer's first call is its last.
                    self._functions.setdefault(id(variable), number)

    def part_of(self, variable: Any) -> int | None:
        """Number of the compiled function that gradients of a variable come from, or None."""
        return self._functions.get(id(variable))

    def parts_of(self, function: keras.Function) -> dict[int, int]:
        """Cuts the graph of a functional model.

        Returns:
            Dict from ids of the graph's nodes to numbers of parts, which increase along the graph.
        """
        if function not in self._parts:
            self._parts[function] = self._cut(function)
        return self._parts[function]

    def _cut(self, function: keras.Function) -> dict[int, int]:
        nodes = nodes_in_order(function)
        sizes: list[int] = []
        seen: set[int] = set()
        for node in nodes:
            operation = node.operation
            # The gradient of a layer that is called several times is complete after its first call.
            is_counted = id(operation) not in seen and not self.is_cut(operation)
            sizes.append(self._bytes([operation]) if is_counted else 0)
            seen.add(id(operation))
        heavy = [size for size in sizes if size]
        number = min(self._count(sum(heavy)), len(heavy))
        if number < 2:
            return {}
        cuts = contiguous_parts(len(heavy), number, summed(heavy))
        numbers, part = iter(part_numbers(cuts)), 0
        found: dict[int, int] = {}
        for node, size in zip(nodes, sizes):
            # Layers without weights belong to what is before them.
            part = next(numbers) if size else part
            found[id(node)] = part
        return found

    def _count(self, size: int) -> int:
        """Number of parts of layers whose weights have so many bytes."""
        share = min(1.0, size / self._whole) if self._whole else 0.0
        return max(1, round(self._number * share))

    def _bytes(self, operations: Iterable[Any]) -> int:
        """Bytes of the weights that operations train and workers have."""
        layers = [one for one in operations if isinstance(one, keras.Layer)]
        own = [one for layer in layers for one in layer._flatten_layers()]
        weights = {
            id(variable): math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
            for layer in own
            if not self._is_remote(layer)
            for variable in layer._trainable_variables
            if variable.trainable
        }
        return sum(weights.values())
