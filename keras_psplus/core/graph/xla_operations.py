"""Operations of a graph that XLA cannot compile."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import tensorflow as tf

from keras_psplus.tf_internals import registered_kernels

_REFUSED = ("Collective", "While", "StatelessWhile")
# Their gradients need optional values, of which XLA has none.
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_DEVICES = {"XLA_CPU_JIT", "XLA_GPU_JIT"}
# Parts of a function, which compilation replaces.
_OF_FUNCTIONS = {"Placeholder", "_Arg", "_Retval", "NoOp", "PlaceholderWithDefault"}


def missing(graph: tf.Graph) -> list[str]:
    """Types of operations of a graph and its functions that XLA lacks.

    Collectives count as lacking: XLA has none for CPUs. So do loops and branches: what they keep
    for their gradient cannot leave a compiled function.

    Returns:
        Sorted list of names.
    """
    definition = graph.as_graph_def()
    functions = {one.signature.name: one.node_def for one in definition.library.function}
    nodes = [*definition.node, *(node for body in functions.values() for node in body)]
    return _lacking({node.op for node in nodes} - set(functions))


def missing_of(graph: tf.Graph, operations: Iterable[tf.Operation]) -> list[str]:
    """Types of some operations, and of functions that they call, that XLA lacks.

    Args:
        operations: Some of its operations.

    Returns:
        Sorted list of names.
    """
    types: set[str] = set()
    seen: set[str] = set()
    waiting = list(operations)
    for op in waiting:
        types.add(op.type)
        for name in _called(op) - seen:
            seen.add(name)
            inner = getattr(graph._get_function(name), "graph", None)
            waiting += [] if inner is None else inner.get_operations()
    return _lacking(types)


def _called(op: tf.Operation) -> set[str]:
    attributes = op.node_def.attr.values()
    return {one.func.name for one in attributes if one.WhichOneof("value") == "func"}


def _lacking(types: set[str]) -> list[str]:
    return sorted(
        name
        for name in types - _OF_FUNCTIONS
        if name.startswith(_REFUSED) or name in _BRANCHES or not _has(name)
    )


@functools.cache
def _has(name: str) -> bool:
    _register()
    kernels = registered_kernels.get_registered_kernels_for_op(name).kernel
    return any(kernel.device_type in _DEVICES for kernel in kernels)


@functools.cache
def _register() -> None:
    # They are registered when the first function is compiled: here, not on a stage's worker, which
    # refuses by chance to execute a compiled function.
    with tf.init_scope(), tf.device(None), tf.device("/CPU:0"):
        tf.function(lambda x: x + 1.0, autograph=False, jit_compile=True)(tf.zeros([]))
