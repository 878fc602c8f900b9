"""Hooks at the end of a trace, when a function's graph can still change."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_psplus.tf_internals import func_graph


def call_at_end(graph: Any, function: Callable[[Sequence[Any]], None]) -> None:
    """Registers a function for the end of a graph's trace.

    It can still add operations to the graph.

    Args:
        graph: `FuncGraph` of a function, a branch or a loop's body that is being traced.
    """
    assert isinstance(graph, func_graph.FuncGraph)
    if not isinstance(graph.outputs, _Outputs):
        graph.outputs = _Outputs(graph.outputs)
    graph.outputs.functions.append(function)


class _Outputs(list[Any]):
    """List of a graph's outputs, which TensorFlow fills when a trace ends."""

    def __init__(self, outputs: Iterable[Any]) -> None:
        super().__init__(outputs)
        self.functions: list[Callable[[Sequence[Any]], None]] = []

    def extend(self, outputs: Iterable[Any]) -> None:
        # TensorFlow gives a generator, which captures what comes from outside of the graph.
        outputs = list(outputs)
        while self.functions:  # One of them may register another.
            self.functions.pop(0)(outputs)
        super().extend(outputs)
