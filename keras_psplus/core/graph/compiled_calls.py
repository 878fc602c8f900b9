"""Models' calls that XLA compiles, with their gradients."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base.threads import ThreadFlag, ThreadValue
from keras_psplus.core.graph.subgraph import Segment, split
from keras_psplus.engine import Call, Engine
from keras_psplus.keras_internals.keras_parts import (
    get_keras_mask,
    global_state,
    set_keras_mask,
    tree,
)
from keras_psplus.log import logger
from keras_psplus.tf_internals import framework_ops, registered_kernels

# A call as a function of its tensors, compiled by XLA with its gradient.

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
    """
    definition = graph.as_graph_def()
    functions = {one.signature.name: one.node_def for one in definition.library.function}
    nodes = [*definition.node, *(node for body in functions.values() for node in body)]
    return _lacking({node.op for node in nodes} - set(functions))


def missing_of(graph: tf.Graph, operations: Iterable[tf.Operation]) -> list[str]:
    """Types of some operations, and of functions that they call, that XLA lacks."""
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
        """The reason why XLA cannot compile the function, or None."""
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
    """Whether what is traced now is, or lies in, the gradient of a function."""
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


# Models' calls that XLA compiles, with their gradients.
#
#     batch ─► [ model ] ─► loss ─► tape ─► [ gradients of the model ] ─► collectives, optimizer
#              compiled                       compiled
#
# Collectives cannot be compiled, on CPUs at least, and sums of gradients would
# wait for the last of them. So only the call of a model in the step is one compiled function; its
# gradient is one too, as TensorFlow compiles the gradient of what it compiles. Of a functional
# model that XLA cannot compile, what is before and after the operations in the way is.

_COMPILED, _AS_IT_IS = "compiled", "as it is"
# Engine and compiler of the step that this thread traces outside of a `ReplicaStep`.
current: ThreadValue[tuple[Engine, CompiledCalls]] = ThreadValue()


@contextlib.contextmanager
def without_compilation(model: keras.Model) -> Iterator[None]:
    """Context in which Keras makes functions of a model without XLA."""
    compiles, model.jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model.jit_compile = compiles


class CompiledCalls:
    """Compiles the outermost calls of models in one function, or parts of them.

    Args:
        model: The model that was compiled with `jit_compile`.
        is_asked_for: Whether by `jit_compile=True`, and not by default.
        is_remote: Function of a layer that tells whether it talks to servers.
        make: Makes a compiled function, as `CompiledFunction` does.
        forms: Counts the model's compilations.
        is_cut: Function of an operation of a model that tells whether layers inside of it are
            compiled by themselves.

    Attributes:
        count: Number of calls that are compiled.
        reasons: Reasons why others are not, in words.
    """

    def __init__(
        self,
        model: keras.Model,
        is_asked_for: bool,
        is_remote: Callable[[keras.Layer], bool] = lambda layer: False,
        make: Callable[..., CompiledFunction] = CompiledFunction,
        forms: CompilationCount | None = None,
        is_cut: Callable[[Any], bool] = lambda operation: False,
    ) -> None:
        self._make, self._forms, self._is_cut = make, forms, is_cut
        self._model, self._is_asked_for, self._is_remote = model, is_asked_for, is_remote
        # In a compiled function; and in a call of which each layer is one.
        self._is_inside, self._is_in_layers = ThreadFlag(), ThreadFlag()
        # Operations of models that XLA cannot compile.
        self._not_compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        # By graphs, and by what callers know functions by.
        self._functions: weakref.WeakKeyDictionary[tf.Graph, dict[Any, CompiledFunction]]
        self._functions = weakref.WeakKeyDictionary()
        # By models, and by the kinds of their operations.
        self._segments: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], list[Segment]]]
        self._segments = weakref.WeakKeyDictionary()
        self.count = 0
        self.reasons: list[str] = []

    @property
    def is_tracing(self) -> bool:
        """Whether this thread traces just now what XLA is to compile, or its gradient."""
        return bool(self._is_inside) or is_in_gradient()

    def of_this_thread(self, engine: Engine) -> AbstractContextManager[Any]:
        """Context in which this thread traces a step of a strategy's engine."""
        return current.being((engine, self))

    def takes(self, layer: keras.Layer) -> bool:
        """Whether a call of a layer is to be compiled."""
        if self.is_tracing or tf.executing_eagerly():
            return False
        return isinstance(layer, keras.Model) or bool(self._is_in_layers and layer.weights)

    def call(
        self, original: Callable[..., Any], layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a layer in a compiled function, or in several, if XLA can compile it."""
        function = functools.partial(original, layer)
        if self._is_cut(layer):
            with self._is_in_layers.raised():
                return function(*args, **kwargs)
        compiled = None
        if self.is_compiled(layer):
            compiled = self.function(function, [layer], args, kwargs)
        if compiled is not None:
            return compiled(*args, **kwargs)
        with self._is_in_layers.lowered():
            return function(*args, **kwargs)

    def function(
        self,
        function: Callable[..., Any],
        layers: Iterable[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: Any = None,
        device: str | None = None,
    ) -> CompiledFunction | None:
        """Makes a compiled function of calls of layers.

        Args:
            function: Function of the arguments that calls the layers.
            layers: The layers, among other operations of a model.
            key: Where a function is for several calls in one graph: what they have in common.
            device: Name of the device that it runs on, if its variables may be on others.

        Returns:
            The function; None if XLA cannot compile it: then the reason is noted and logged.
        """
        layers = [layer for layer in layers if isinstance(layer, keras.Layer)]
        names = ", ".join(f"'{layer.name}'" for layer in layers[:3])
        known = self._functions.setdefault(tf.compat.v1.get_default_graph(), {})
        if key is not None:
            key = key, _forms((args, kwargs))
        compiled = known.get(key)
        if compiled is None:
            flat = functools.partial(_flatten, layers)
            with self._is_inside.raised():
                compiled = self._make(function, flat, args, kwargs)
            reason = compiled.why_not(device)
            if reason is not None:
                self.note(f"the call of {names}: {reason}")
                return None
            if key is not None:
                known[key] = compiled
        self.count += 1
        if self._forms is not None:
            tensors = [one for one in tree.flatten((args, kwargs)) if tf.is_tensor(one)]
            self._forms.note(names, tensors)
        return compiled

    def run_graph(self, call: Call) -> Any:
        """Runs the graph of a functional model, parts of it in compiled functions."""
        run = call.get("operation_fn") or (lambda operation: operation)
        if self.is_tracing:
            return call.proceed(operation_fn=functools.partial(self._watched, run))

        def kind_of(operation: Any) -> str:
            is_compiled = self.is_compiled(operation) and not self._is_cut(operation)
            return _COMPILED if is_compiled else _AS_IT_IS

        def run_one(segment: Segment, found: dict[int, Any]) -> bool:
            compiled, plain = None, functools.partial(run_segment, segment, run)
            if segment.kind == _COMPILED and have_weights(segment.operations):
                given = [found[id(one)] for one in segment.function.inputs]
                compiled = self.function(plain, segment.operations, (given,), {})
                if compiled is None and not all(map(self.is_compiled, segment.operations)):
                    return False
            segment.run(found, compiled or plain)
            return True

        return self.run_segments(call, kind_of, run_one)

    def run_segments(
        self,
        call: Call,
        kind_of: Callable[[Any], Any],
        run_one: Callable[[Segment, dict[int, Any]], bool],
    ) -> Any:
        """Runs the graph of a functional model, segment by segment.

        Args:
            kind_of: Function of an operation that returns its kind, as for `split`.
            run_one: Function of a segment, and of tensors by ids of symbolic ones, to which it adds
                the outputs. It returns False if the segment is to be cut once more.
        """
        model, given = call.owner, tree.flatten(call.get("inputs"))
        if (
            not isinstance(model, keras.Model)
            or call.get("call_fn") is not None
            or tf.executing_eagerly()
            or not all(tf.is_tensor(one) for one in given)
        ):
            return call.proceed()
        found = {id(one): tensor for one, tensor in zip(model.inputs, given)}

        def run(function: Any) -> None:
            for segment in self._segments_of(function, kind_of):
                if not run_one(segment, found):
                    run(segment.function)

        run(model)
        return tree.pack_sequence_as(model._outputs_struct, [found[id(t)] for t in model.outputs])

    def _segments_of(self, function: Any, kind_of: Callable[[Any], Any]) -> list[Segment]:
        known = self._segments.setdefault(function, {})
        kinds = tuple(kind_of(operation) for operation in function.operations)
        if kinds not in known:
            known[kinds] = split(function, kind_of)
        return known[kinds]

    def is_compiled(self, operation: Any) -> bool:
        """Whether nothing is known that keeps XLA from compiling an operation of a model."""
        if operation in self._not_compiled:
            return False
        return not isinstance(operation, keras.Layer) or not self._has_remote(operation)

    def _watched(self, run: Callable[..., Any], operation: Any) -> Callable[..., Any]:
        """Runs an operation of a model, and notes whether XLA can compile it."""
        inner = run(operation)

        def call(*args: Any, **kwargs: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            outputs = inner(*args, **kwargs)
            if why_not_given(tree.flatten((args, kwargs))) or missing_of(
                graph, graph.get_operations()[before:]
            ):
                self._not_compiled.add(operation)
            return outputs

        return call

    def _has_remote(self, layer: keras.Layer) -> bool:
        remote = [one for one in layer._flatten_layers() if self._is_remote(one)]
        for one in remote:
            self.note(f"the call of '{one.name}': it talks to servers")
        return bool(remote)

    def note(self, reason: str) -> None:
        """Notes, and logs, a reason why something is not compiled."""
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


def run_segment(segment: Segment, run: Callable[..., Any], given: list[Any]) -> Any:
    """Outputs of a segment, uncompiled."""
    return segment.function._run_through_graph(given, operation_fn=run)


def have_weights(operations: Iterable[Any]) -> bool:
    """Whether some operations of a model are more than reshapes: whether there are weights."""
    return any(isinstance(one, keras.Layer) and one.weights for one in operations)


def _flatten(layers: list[keras.Layer]) -> list[keras.Layer]:
    found = {id(one): one for layer in layers for one in layer._flatten_layers()}
    return list(found.values())


def _forms(structure: Any) -> tuple[Any, ...]:
    """Shapes, types and values by which calls can share a function."""

    def form(leaf: Any) -> Any:
        return (str(leaf.shape), leaf.dtype) if isinstance(leaf, tf.Tensor) else leaf

    leaves = [form(leaf) for leaf in tree.flatten(structure)]
    return tuple(id(leaf) if getattr(leaf, "__hash__", None) is None else leaf for leaf in leaves)


# Counts compilations of parts of a model: one for each form of their arguments.

MOST = 10


class CompilationCount:
    """Forms of the tensors that compiled functions of one model were called with.

    Shapes that are known when a step is traced are noted in Python. Others are noted by the step
    itself, in a table of this process.

    Args:
        is_local: Whether this process computes the functions.
    """

    def __init__(self, name: str, is_local: bool = True) -> None:
        self._name, self._is_local = name, is_local
        self._known: dict[str, set[str]] = {}
        self._tables: dict[str, tf.lookup.experimental.MutableHashTable] = {}
        self._said: set[str] = set()

    def note(self, layers: str, tensors: Sequence[tf.Tensor]) -> None:
        """Notes a call of a function that is being traced."""
        if all(tensor.shape.is_fully_defined() for tensor in tensors):
            shapes = " ".join(str(tuple(tensor.shape)) for tensor in tensors)
            self._known.setdefault(layers, set()).add(shapes)
        elif self._is_local:
            with tf.init_scope(), tf.device("CPU:0"):
                if layers not in self._tables:
                    self._tables[layers] = tf.lookup.experimental.MutableHashTable(
                        tf.string, tf.int64, 0
                    )
            with tf.device("CPU:0"):
                texts = [
                    tf.strings.reduce_join(tf.strings.as_string(tf.shape(one)), separator=", ")
                    for one in tensors
                    if one.shape.rank != 0
                ]
                shapes = tf.strings.join([*("(" + text + ")" for text in texts)], " ")
                self._tables[layers].insert(shapes, tf.ones([], tf.int64))

    def forms(self, layers: str) -> list[str]:
        """The shapes that some layers were called with, as text."""
        found = set(self._known.get(layers, ()))
        if layers in self._tables:
            keys, _ = self._tables[layers].export()
            found |= {key.decode() for key in keys.numpy()}
        return sorted(found)

    def report(self) -> None:
        """Logs which layers were called with more than ten forms of tensors, once for each."""
        for layers in {*self._known, *self._tables} - self._said:
            forms = self.forms(layers)
            if len(forms) > MOST:
                self._said.add(layers)
                logger.info(
                    "XLA has compiled %s of '%s' %d times, for tensors of the shapes %s and "
                    "others: pad sequences and batches to few sizes",
                    layers,
                    self._name,
                    len(forms),
                    ", ".join(forms[:_LISTED]),
                )
