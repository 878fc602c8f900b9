"""A call as a function of its tensors, compiled by XLA with its gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import (
    get_keras_mask,
    global_state,
    set_keras_mask,
    tree,
)
from keras_psplus.tf_internals import framework_ops, registered_kernels

# Operations of a graph that XLA cannot compile.


_REFUSED = ("Collective", "While", "StatelessWhile")
# Their gradients need optional values, of which XLA has none.
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_DEVICES = {"XLA_CPU_JIT", "XLA_GPU_JIT"}
# Parts of a function, which compilation replaces.
_OF_FUNCTIONS = {"Placeholder", "_Arg", "_Retval", "NoOp", "PlaceholderWithDefault"}


def missing_kernels(graph: tf.Graph) -> list[str]:
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


_LISTED = 3
_CALL_CONTEXT = "current_call_ctx"
# In the place of a tensor among what the function returns.
_TENSOR = object()
# Beginning of the names of compiled functions' graphs.
_NAME = "keras_psplus_compiled_"
_numbers = itertools.count()


class CompiledFunction:
    """Function of the tensors among a call's arguments, and of their masks.

    Keras hangs masks on tensors and losses on layers: both go into the function, and leave it, with
    the tensors.

    Args:
        function: Function of the arguments.
        layers: Function that lists the layers that it calls, and those inside of them.
        args: Arguments of the first call; others may differ in their tensors.

    Attributes:
        kind: Beginning of its graph's name, by which its gradient is known.
        losses: List of the losses that layers have added in the last call.
    """

    kind = _NAME

    def __init__(
        self,
        function: Callable[..., Any],
        layers: Callable[[], Iterable[keras.Layer]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._python, self._layers, self._given = function, layers, (args, kwargs)
        self._flat = tree.flatten(self._given)
        self._places = [i for i, one in enumerate(self._flat) if tf.is_tensor(one)]
        self._inside: Any = None
        # Found by the trace: the structure of outputs, what is no tensor there, layers by their
        # losses, and what Keras's context says behind the call, such as whether layers train.
        self._structure: Any = None
        self._leaves: list[Any] = []
        self._owners: list[tuple[keras.Layer, int]] = []
        # Places of the tensors whose masks the layers have taken away.
        self._unmasked: list[int] = []
        self.losses: list[tf.Tensor] = []
        self._function = tf.function(self._run, autograph=False, jit_compile=True)
        context = _context()
        before = dict(context)
        self._graph = self._function.get_concrete_function(*self._inputs(self._flat)).graph
        self._behind = {k: v for k, v in context.items() if k != "entry_layer"}
        context.clear()
        context.update(before)

    @property
    def variables(self) -> list[tf.Variable]:
        return list(self._graph.variables)

    @property
    def is_in_gradient(self) -> bool:
        """Whether what is traced now is the function's gradient, or lies in it."""
        return self._inside is not None and is_in_gradient_of(f"{self._inside.name}_")

    @property
    def captured(self) -> list[tf.Tensor]:
        """Tensors outside that it uses, beside its arguments."""
        return [outside for outside, _ in self._graph.captures]

    def why_not(self, device: str | None = None) -> str | None:
        """The reason why XLA cannot compile the function, or None.

        Args:
            device: Name of the device that it runs on, if its variables may be on others.
        """
        reason = why_not_given([self._flat[i] for i in self._places])
        if reason is not None:
            return reason
        for variable in self.variables if device is not None else ():
            if _task_and_device(variable.device) != _task_and_device(device):
                return f"its variable '{variable.name}' is on {variable.device}"
        missing = missing_kernels(self._graph)
        return "XLA cannot compile its " + ", ".join(missing[:_LISTED]) if missing else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; returns what the call of the layers would return."""
        flat = tree.flatten((args, kwargs))
        outputs, masks, added, changes = self._function(*self._inputs(flat))
        self._write(changes)
        for i in self._unmasked:
            set_keras_mask(flat[i], None)
        for output, mask in zip(outputs, masks):
            if mask is not None:
                set_keras_mask(output, mask)
        self.losses, losses = list(added), iter(added)
        # Keras clears the losses of earlier calls when it enters the outermost layer.
        context = _context()
        is_outermost = not context
        context.update(self._behind)
        for layer in self._layers() if is_outermost else ():
            layer._losses.clear()
        for layer, count in self._owners:
            layer._losses.extend(next(losses) for _ in range(count))
        tensors = iter(outputs)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return tree.pack_sequence_as(self._structure, leaves)

    def replace_losses(self, others: Mapping[int, tf.Tensor]) -> None:
        """Replaces the losses that layers have added in the last call, by their ids."""
        for layer, _ in self._owners:
            layer._losses[:] = [others.get(id(loss), loss) for loss in layer._losses]

    def _write(self, changes: list[tf.Tensor]) -> None:
        """Gives variables values that the function has returned; it writes to them itself."""

    def _inputs(self, flat: list[Any]) -> tuple[Any, ...]:
        tensors = [flat[i] for i in self._places]
        return tensors, [get_keras_mask(one) for one in tensors]

    def _run(
        self, tensors: Sequence[tf.Tensor], masks: Sequence[tf.Tensor | None]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor | None], list[tf.Tensor], list[tf.Tensor]]:
        self._inside = framework_ops.get_default_graph()
        self._inside.name = f"{self.kind}{next(_numbers)}"
        flat = list(self._flat)
        for i, tensor, mask in zip(self._places, tensors, masks):
            flat[i] = tensor
            if mask is not None:
                set_keras_mask(tensor, mask)
        args, kwargs = tree.pack_sequence_as(self._given, flat)
        before = {id(layer): list(layer._losses) for layer in self._layers()}
        for layer in self._layers():
            layer._losses.clear()
        try:
            self._structure = self._python(*args, **kwargs)
        finally:
            # The function's tensors are of no use outside of it.
            layers = list(self._layers())
            found = [list(layer._losses) for layer in layers]
            for layer in layers:
                layer._losses[:] = before.get(id(layer), ())
        given = zip(self._places, tensors, masks)
        self._unmasked = [
            i for i, one, mask in given if mask is not None and get_keras_mask(one) is None
        ]
        self._owners = [(layer, len(own)) for layer, own in zip(layers, found) if own]
        leaves = tree.flatten(self._structure)
        outputs = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        self._leaves = [_TENSOR if tf.is_tensor(leaf) else leaf for leaf in leaves]
        added = [loss for own in found for loss in own]
        return outputs, [get_keras_mask(output) for output in outputs], added, []


def is_in_gradient() -> bool:
    """Whether what is traced now is, or lies in, the gradient of a compiled function.

    There layers are called that backward computes once more.
    """
    return is_in_gradient_of(_NAME)


def graphs() -> Iterator[Any]:
    """The graph that is being traced, and those around it."""
    graph = framework_ops.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def is_in_gradient_of(*names: str) -> bool:
    """Whether what is traced now is, or lies in, the gradient of a function.

    Args:
        *names: Beginnings of the names of functions; of one of them.
    """
    # TensorFlow names it so.
    begin = tuple(f"__backward_{name}" for name in names)
    return any(getattr(graph, "name", "").startswith(begin) for graph in graphs())


def _context() -> dict[str, Any]:
    """Attributes of Keras's context of the outermost call under way; none outside of calls."""
    context = global_state.get_global_attribute(_CALL_CONTEXT)
    return {} if context is None else vars(context)


def why_not_given(tensors: Iterable[Any]) -> str | None:
    """The reason why XLA cannot compile a function of some tensors, or None."""
    tensors = [one for one in tensors if tf.is_tensor(one)]
    if not all(isinstance(one, tf.Tensor) for one in tensors):
        return "its inputs are ragged or sparse"
    return "its inputs are strings" if any(one.dtype == tf.string for one in tensors) else None


def _task_and_device(name: str | None) -> tuple[Any, ...]:
    spec = tf.DeviceSpec.from_string(name or "")
    return spec.job, spec.task, spec.device_type, spec.device_index
