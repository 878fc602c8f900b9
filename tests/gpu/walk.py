"""Walks a traced function as if some of its devices were GPUs.

Of each tensor it says in which memory it would be: a kernel reads and writes its device's memory,
but for the arguments that its registration keeps in host memory; what is no kernel of GPUs runs on
the host, by soft placement; operations on resources run where these are; and arguments of type
int32 go through the host where functions and branches are called.

This is a model of TensorFlow's placement, not the placer itself: it knows no groups of operations
that must be together, and what has no device is where its caller is.
"""

import collections
import functools
import typing

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph

from tests.gpu import kernels

HOST = "host"
# Of tasks without GPUs, whose bytes have to cross, and are counted elsewhere.
_REMOTE = "remote"
# Of arguments of the step: they are where the caller has them, and the batch crosses once.
_ARGUMENT = "argument"
_CALLS = {
    "PartitionedCall": ["f"],
    "StatefulPartitionedCall": ["f"],
    "If": ["then_branch", "else_branch"],
    "StatelessIf": ["then_branch", "else_branch"],
    "While": ["cond", "body"],
    "StatelessWhile": ["cond", "body"],
    "Case": ["branches"],
    "StatelessCase": ["branches"],
}
_PLAIN_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# The first argument chooses the branch.
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
# Nothing is computed by them.
_PASSIVE = ("NoOp", "Placeholder", "_Arg", "_Retval")
# They have no bytes, or are never on a GPU.
_NOT_COPIED = (tf.resource, tf.variant, tf.string)


class Copy(typing.NamedTuple):
    """A tensor that an operation needs in the other memory.

    Attributes:
        tensor: Tensor.
        op: The operation that reads it.
        to_host: Whether it goes from GPU to host; otherwise the other way.
    """

    tensor: tf.Tensor
    op: tf.Operation
    to_host: bool


class Walk:
    """What a function's operations would need of GPUs.

    Args:
        is_gpu: Function of a `tf.DeviceSpec` that tells whether it stands for a GPU.
        hosts: Jobs of other tasks, without GPUs.

    Attributes:
        on_gpu: Number of operations that are to run on a GPU.
        without_kernel: Those of them that run on the host: a GPU has no kernel for them, or one
            whose numbers are in host memory.
        copies: List of `Copy`.
        host_int32: Pairs of an int32 tensor and an operation of a GPU that has it in host memory.
        collectives: Collective operations of GPUs.
    """

    def __init__(self, is_gpu, hosts=("ps", "chief")):
        self._is_gpu, self._hosts = is_gpu, hosts
        self.on_gpu = 0
        self.without_kernel: list[tf.Operation] = []
        self.copies: list[Copy] = []
        self.host_int32: list[tuple[tf.Tensor, tf.Operation]] = []
        self.collectives: list[tf.Operation] = []

    def function(self, function, default=HOST):
        """Walks a `ConcreteFunction`.

        Args:
            function: The function.
            default: Device of operations that have none.

        Returns:
            The walk itself.
        """
        captured = {internal.ref(): external for external, internal in function.graph.captures}
        memories = []
        for tensor in function.graph.inputs:
            external = captured.get(tensor.ref())
            if external is None:
                memories.append(_ARGUMENT)
            else:
                memories.append(self._place(getattr(external, "device", None) or "", HOST))
        self._graph(function.graph, memories, default)
        return self

    def _graph(self, graph, memories, default):
        """Returns the memories of a graph's outputs."""
        memory = {tensor.ref(): place for tensor, place in zip(graph.inputs, memories)}
        for op in _in_order(graph):
            if op.type == "Placeholder":
                memory.setdefault(op.outputs[0].ref(), HOST)
            elif op.type in _CALLS:
                self._call(op, memory, self._place(op.device, default))
            else:
                self._operation(op, memory, self._place(op.device, default))
        return [memory[tensor.ref()] for tensor in graph.outputs]

    def _operation(self, op, memory, place):
        inputs, outputs = kernels.arguments(op)
        resource = next((memory[t.ref()] for t, _ in inputs if t.dtype == tf.resource), None)
        if resource is not None and not op.type.startswith("Collective"):
            place = resource
        on_host = ()
        if place not in (HOST, _REMOTE) and op.type not in _PASSIVE:
            kernel = kernels.kernel_for(op)
            if op.type.startswith("Collective"):
                self.collectives.append(op)
            self.on_gpu += 1
            if kernel is None or _computes_on_host(kernel, inputs):
                self.without_kernel.append(op)
                # The copies are a consequence, and not counted by themselves.
                memory.update((t.ref(), HOST) for t, _ in outputs)
                return
            on_host = kernel.host_memory_arg
            both = [*inputs, *outputs]
            self.host_int32 += [(t, op) for t, name in both if name in on_host and _is_int32(t)]
        for tensor, name in inputs:
            self._read(tensor, op, memory, HOST if name in on_host else place)
        for tensor, name in outputs:
            if tensor.dtype == tf.resource:
                memory[tensor.ref()] = place if resource is None else resource
            else:
                memory[tensor.ref()] = HOST if name in on_host else place

    def _read(self, tensor, op, memory, place):
        both = {memory[tensor.ref()], place}
        crosses = HOST in both and len(both) == 2 and both.isdisjoint((_REMOTE, _ARGUMENT))
        if crosses and tensor.dtype.base_dtype not in _NOT_COPIED:
            self.copies.append(Copy(tensor, op, to_host=place == HOST))

    def _call(self, op, memory, place):
        arguments = [self._argument(tensor, op, memory) for tensor in op.inputs]
        if op.type in _BRANCHES:
            self._read(op.inputs[0], op, memory, HOST)
            arguments = arguments[1:]
        results = None
        for attribute in _CALLS[op.type]:
            called = op.get_attr(attribute)
            for function in called if isinstance(called, list) else [called]:
                graph = _graph_of(op.graph, function.name)
                found = self._graph(graph, arguments, place)
                if attribute != "cond":
                    results = results or found
                    self._results(op, graph, found, place)
        for tensor, found in zip(op.outputs, results):
            memory[tensor.ref()] = self._result(op, tensor, found, place)

    def _argument(self, tensor, op, memory):
        there = memory[tensor.ref()]
        if there in (HOST, _REMOTE, _ARGUMENT) or not _is_int32(tensor):
            return there
        self.host_int32.append((tensor, op))
        self._read(tensor, op, memory, HOST)
        return HOST

    def _results(self, op, graph, found, place):
        memory = {tensor.ref(): one for tensor, one in zip(graph.outputs, found)}
        for inner, outer, there in zip(graph.outputs, op.outputs, found):
            wanted = self._result(op, outer, there, place)
            if wanted == HOST and there not in (HOST, _REMOTE) and _is_int32(outer):
                self.host_int32.append((inner, op))
            self._read(inner, op, memory, wanted)

    def _result(self, op, tensor, there, place):
        """The memory of what a call returns."""
        if tensor.dtype == tf.resource or op.type in _PLAIN_CALLS:
            return HOST if _is_int32(tensor) else there
        return HOST if _is_int32(tensor) else place

    def _place(self, device, default):
        if not device:
            return default
        spec = _spec(device)
        if spec.job in self._hosts:
            return _REMOTE
        if spec.device_type is None:
            # What is only said to be on a worker is on its GPU.
            return f"{spec.job}:{spec.task}:gpu" if spec.job and default == HOST else default
        return device if self._is_gpu(spec) else HOST


@functools.cache
def _spec(device):
    return tf.DeviceSpec.from_string(device)


def _computes_on_host(kernel, inputs):
    """Whether a kernel of a GPU is one of the host in truth, as that of `Qr` is."""
    return any(
        name in kernel.host_memory_arg and tensor.dtype.is_floating and tensor.shape.rank != 0
        for tensor, name in inputs
    )


def _is_int32(tensor):
    return tensor.dtype.base_dtype == tf.int32


def _in_order(graph):
    """Operations after those that they read; inputs may have been replaced by later ones."""
    done, waiting = set(), collections.deque(graph.get_operations())
    while waiting:
        stack = [waiting.popleft()]
        while stack:
            op = stack[-1]
            if op in done:
                stack.pop()
                continue
            missing = [t.op for t in op.inputs if t.op not in done]
            if missing:
                stack += missing
                continue
            done.add(op)
            stack.pop()
            yield op


def _graph_of(graph, name):
    """The graph of a function that is called in a graph."""
    while graph is not None:
        function = graph._functions.get(name)
        if function is not None and getattr(function, "graph", None) is not None:
            return function.graph
        last, graph = graph, getattr(graph, "outer_graph", None)
    function = last._get_function(name)
    return function_def_to_graph.function_def_to_graph(function.cached_definition)
