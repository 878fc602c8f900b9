"""Models' calls that XLA compiles, with their gradients.

    batch ─► [ model ] ─► loss ─► tape ─► [ gradients of the model ] ─► collectives, optimizer
             compiled                       compiled

What talks to other replicas cannot be compiled, on CPUs at least, and sums of gradients would wait
for the last of them. So only the call of a model in the step is one compiled function; its
gradient is one too, as TensorFlow compiles the gradient of what it compiles. Of a functional model
that XLA cannot compile, what is before and after the operations in the way is.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base.threads import ThreadFlag, ThreadValue
from keras_psplus.core.graph import compiled_function
from keras_psplus.core.graph.compiled_function import (
    CompiledFunction,
    is_in_gradient,
    why_not_given,
)
from keras_psplus.core.graph.subgraph import Segment, split
from keras_psplus.engine import Call, Engine
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.log import logger

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
        """Calls a layer in a compiled function, or in several, if XLA can compile it.

        Args:
            original: Function of the layer and its arguments that calls it.
        """
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
        """Runs the graph of a functional model, parts of it in compiled functions.

        Args:
            call: The call of `Function._run_through_graph`.
        """
        run = call.get("operation_fn") or _same
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
            call: The call of `Function._run_through_graph`.
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
            if why_not_given(tree.flatten((args, kwargs))) or compiled_function.missing_of(
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
    """Outputs of a segment, uncompiled.

    Args:
        run: Function of an operation that returns what calls it.
    """
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
    return tuple(leaf if _is_hashable(leaf) else id(leaf) for leaf in leaves)


def _is_hashable(leaf: Any) -> bool:
    return getattr(leaf, "__hash__", None) is not None


def _same(operation: Any) -> Any:
    return operation


# Counts compilations of parts of a model: one for each form of their arguments.


MOST = 10
_LISTED = 3


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
        """Notes a call of a function that is being traced.

        Args:
            layers: Names of the layers that the function calls.
        """
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
