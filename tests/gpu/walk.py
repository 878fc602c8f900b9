"""Walks a traced function as if some of its devices were GPUs.

Of each tensor it says in which memory it would be: a kernel reads and writes its device's memory,
but for the arguments that its registration keeps in host memory; what is no kernel of GPUs runs on
the host, by soft placement; operations on resources run where these are; and arguments of type
int32 go through the host where functions and branches are called.

What an operation of the host computes is late if it needs something of a GPU: a GPU whose own
operations need that in turn, or are in a branch that it chooses, waits for the host, and stands
still. The tensors and control edges that it comes from are `Walk.waits`.

This is a model of TensorFlow's placement, not the placer itself: it knows no groups of operations
that must be together, and what has no device is where its caller is.
"""

import collections
import functools
import typing

import tensorflow as tf
from tensorflow.python.distribute import input_lib
from tensorflow.python.framework import function_def_to_graph

from tests.gpu import kernels

HOST = "host"
# Of tasks without GPUs, whose bytes have to cross, and are counted elsewhere.
_REMOTE = "remote"
# Of arguments of the step: they are where the caller has them, and the batch crosses once.
_ARGUMENT = "argument"
# Of what an iterator on the host has.
_BATCH = "batch"
_NOT_OF_GPUS = (HOST, _REMOTE, _ARGUMENT, _BATCH)
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
_ITERATORS = ("IteratorGetNext", "IteratorGetNextAsOptional")
_NONE: frozenset = frozenset()
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


class Wait(typing.NamedTuple):
    """Something of a GPU that the host reads, and a GPU waits for in turn.

    Attributes:
        source: The operation of the GPU.
        dtype: Name of the type of its result that is read; empty for a control edge.
        op: The operation of the host that reads it, or waits for it.
    """

    source: tf.Operation
    dtype: str
    op: tf.Operation


class _State(typing.NamedTuple):
    """What is known of a graph's tensors so far.

    Attributes:
        memory: Memories by tensors.
        late: Sets of `Wait` by tensors, and by operations of the host.
        gpu_ops: Operations of GPUs, and calls that have some.
        gate: Set of `Wait` before any of it.
        results: Operations that hand over the graph's outputs.
    """

    memory: dict
    late: dict
    gpu_ops: set
    gate: frozenset
    results: set


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
        waits: Set of `Wait`.
        batches: Tensors of iterators on the host that operations of GPUs read.
        fans: Operations of the host with control edges from several of GPUs.
    """

    def __init__(self, is_gpu, hosts=("ps", "chief")):
        self._is_gpu, self._hosts, self._iterators = is_gpu, hosts, _BATCH
        self.on_gpu = 0
        self.without_kernel: list[tf.Operation] = []
        self.copies: list[Copy] = []
        self.host_int32: list[tuple[tf.Tensor, tf.Operation]] = []
        self.collectives: list[tf.Operation] = []
        self.waits: set[Wait] = set()
        self.batches: list[tf.Tensor] = []
        self.fans: list[tf.Operation] = []

    def function(self, function, default=HOST):
        """Walks a `ConcreteFunction`.

        Args:
            function: The function.
            default: Device of operations that have none.

        Returns:
            The walk itself.
        """
        specs = tf.nest.flatten(function.structured_input_signature)
        if any(isinstance(spec, input_lib.DistributedIteratorSpec) for spec in specs):
            # Each replica's batch comes on its device.
            self._iterators = _ARGUMENT
        captured = {internal.ref(): external for external, internal in function.graph.captures}
        memories = []
        for tensor in function.graph.inputs:
            external = captured.get(tensor.ref())
            if external is None:
                memories.append(_ARGUMENT)
            else:
                memories.append(self._place(getattr(external, "device", None) or "", HOST))
        self._graph(function.graph, (memories, [_NONE] * len(memories)), default)
        return self

    def _graph(self, graph, arguments, default, gate=_NONE):
        """Returns the memories of a graph's outputs, and the waits that they come from.

        Args:
            graph: The graph.
            arguments: Memories and waits of its inputs.
            default: Device of operations that have none.
            gate: Waits before anything in it runs.
        """
        memory, late = {}, {}
        for tensor, place, waits in zip(graph.inputs, *arguments):
            memory[tensor.ref()], late[tensor.ref()] = place, waits
        results = {t.op for t in graph.outputs if t.op.type == "Identity"}
        results |= {c for op in results for c in op.control_inputs if c.type == "NoOp"}
        state = _State(memory, late, set(), gate, results)
        for op in _in_order(graph):
            place = self._place(op.device, default)
            if op.type == "Placeholder":
                memory.setdefault(op.outputs[0].ref(), HOST)
            elif op.type in _CALLS:
                self._call(op, state, place)
            elif op.type in _ITERATORS:
                memory.update((tensor.ref(), self._iterators) for tensor in op.outputs)
            else:
                self._operation(op, state, place)
        return (
            [memory[tensor.ref()] for tensor in graph.outputs],
            [late.get(tensor.ref(), _NONE) for tensor in graph.outputs],
        )

    def _operation(self, op, state, place):
        inputs, outputs = kernels.arguments(op)
        memory = state.memory
        resource = next((memory[t.ref()] for t, _ in inputs if t.dtype == tf.resource), None)
        if resource is not None and not op.type.startswith("Collective"):
            place = resource
        on_host = ()
        if place not in (HOST, _REMOTE, _BATCH) and op.type not in _PASSIVE:
            kernel = kernels.kernel_for(op)
            if op.type.startswith("Collective"):
                self.collectives.append(op)
            self.on_gpu += 1
            if kernel is None or _computes_on_host(kernel, inputs):
                self.without_kernel.append(op)
                # Copies, and waits for them, are a consequence, and not counted by themselves.
                memory.update((t.ref(), HOST) for t, _ in outputs)
                return
            on_host = kernel.host_memory_arg
            both = [*inputs, *outputs]
            self.host_int32 += [(t, op) for t, name in both if name in on_host and _is_int32(t)]
        self._note_waits(op, state, place, inputs, on_host)
        for tensor, name in inputs:
            self._read(tensor, op, memory, HOST if name in on_host else place)
        for tensor, name in outputs:
            if tensor.dtype == tf.resource:
                memory[tensor.ref()] = place if resource is None else resource
            else:
                memory[tensor.ref()] = HOST if name in on_host else place

    def _note_waits(self, op, state, place, inputs, on_host):
        """Notes of what an operation's results are late, or that a GPU waits for what is late."""
        names = {name for _, name in kernels.arguments(op)[1]}
        read = [t for t, name in inputs if place == HOST or name in on_host]
        sources = state.gate.union(
            *(state.late.get(t.ref(), _NONE) for t, _ in inputs), self._before(op, state, place)
        )
        sources |= {_wait(t, op) for t in read if _is_of_gpu(t, state.memory)}
        if place not in _NOT_OF_GPUS and (not names or not names <= {*on_host}):
            state.gpu_ops.add(op)
            self.waits |= sources
        else:
            state.late[op] = sources
            state.late.update((t.ref(), sources) for t in op.outputs)

    def _before(self, op, state, place):
        """Waits by control edges."""
        if op in state.results:
            # All that a function has to do is before its results.
            return _NONE
        sources = _NONE.union(*(state.late.get(before, _NONE) for before in op.control_inputs))
        if place != HOST:
            return sources
        waits = {Wait(c, "", op) for c in op.control_inputs if c in state.gpu_ops}
        if len(waits) > 1:
            self.fans.append(op)
        return sources | waits

    def _read(self, tensor, op, memory, place):
        there = memory[tensor.ref()]
        if there == _BATCH and place not in _NOT_OF_GPUS and tensor.dtype not in _NOT_COPIED:
            self.batches.append(tensor)
        both = {there, place}
        crosses = HOST in both and len(both) == 2 and both.isdisjoint((_REMOTE, _ARGUMENT, _BATCH))
        if crosses and tensor.dtype.base_dtype not in _NOT_COPIED:
            self.copies.append(Copy(tensor, op, to_host=place == HOST))

    def _call(self, op, state, place):
        memory, before = state.memory, self.on_gpu
        gate = state.gate.union(*(state.late.get(c, _NONE) for c in op.control_inputs))
        arguments = [self._argument(tensor, op, state) for tensor in op.inputs]
        if op.type in _BRANCHES:
            self._read(op.inputs[0], op, memory, HOST)
            gate |= self._chooses(op, op.inputs[0], memory, arguments[0][1])
            arguments = arguments[1:]
        arguments = tuple(zip(*arguments)) or ((), ())
        results, late = None, [_NONE] * len(op.outputs)
        for attribute in _CALLS[op.type]:
            called = op.get_attr(attribute)
            for function in called if isinstance(called, list) else [called]:
                graph = _graph_of(op.graph, function.name)
                found, waits = self._graph(graph, arguments, place, gate)
                if attribute == "cond":
                    there = {graph.outputs[0].ref(): found[0]}
                    gate |= self._chooses(op, graph.outputs[0], there, waits[0])
                    continue
                results = results or found
                waits = self._results(op, graph, found, waits, place)
                late = [a | b for a, b in zip(late, waits)]
        for tensor, found, waits in zip(op.outputs, results, late):
            memory[tensor.ref()] = self._result(op, tensor, found, place)
            state.late[tensor.ref()] = waits | (gate if memory[tensor.ref()] == HOST else _NONE)
        if self.on_gpu > before:
            state.gpu_ops.add(op)
        else:
            state.late[op] = gate.union(*late)

    def _chooses(self, op, tensor, memory, late):
        """Waits before the branch is known that a tensor chooses."""
        return late | ({_wait(tensor, op)} if _is_of_gpu(tensor, memory) else _NONE)

    def _argument(self, tensor, op, state):
        """The memory of what a call is given, and its waits."""
        there, late = state.memory[tensor.ref()], state.late.get(tensor.ref(), _NONE)
        if there in _NOT_OF_GPUS or not _is_int32(tensor):
            return there, late
        self.host_int32.append((tensor, op))
        self._read(tensor, op, state.memory, HOST)
        return HOST, late | {_wait(tensor, op)}

    def _results(self, op, graph, found, late, place):
        memory = {tensor.ref(): one for tensor, one in zip(graph.outputs, found)}
        late = list(late)
        for i, (inner, outer, there) in enumerate(zip(graph.outputs, op.outputs, found)):
            wanted = self._result(op, outer, there, place)
            if wanted == HOST and there not in _NOT_OF_GPUS:
                late[i] |= {_wait(inner, op)}
                if _is_int32(outer):
                    self.host_int32.append((inner, op))
            self._read(inner, op, memory, wanted)
        return late

    def _result(self, op, tensor, there, place):
        """The memory of what a call returns."""
        if tensor.dtype == tf.resource or op.type in _PLAIN_CALLS:
            return HOST if _is_int32(tensor) and there != _BATCH else there
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


def _wait(tensor, op):
    return Wait(tensor.op, tensor.dtype.base_dtype.name, op)


def _is_of_gpu(tensor, memory):
    return memory[tensor.ref()] not in _NOT_OF_GPUS and tensor.dtype not in _NOT_COPIED


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
