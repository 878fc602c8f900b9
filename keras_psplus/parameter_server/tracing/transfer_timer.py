"""Seconds for which a worker function waits for the parameter servers, measured in its graph."""

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.cluster.config import task_name
from keras_psplus.core.batch.clock import run_apart, time_after
from keras_psplus.core.graph.stand_ins import sources
from keras_psplus.tf_internals import context, resource_variable_ops
from keras_psplus.tf_internals import framework_ops as ops

READ, SEND = "read", "send"
# Large values of a server that show when it has answered.
_SHOWN = 4


class Part(NamedTuple):
    """A part of a step, `READ` or `SEND`, whole or of a server."""

    name: str
    server: str | None = None


class TransferTimer:
    """Seconds of a step's reads and of its pushes, together and by server.

    Reads are timed from `began`, a scalar, until their values have arrived, pushes from the
    gradients on. `add` counts seconds of a `Part` wherever in the graph it is called.
    """

    def __init__(self, add: Callable[[Part, tf.Tensor], None]) -> None:
        self._add = add
        self._graph = ops.get_default_graph()
        self.began = self._begin = time_after([])
        self._pulled: list[tf.Tensor] = []
        self._arrivals: dict[str | None, tf.Tensor] = {}
        # Called with the operation that has all that the function reads first.
        self.at_arrival: Callable[[tf.Operation], None] | None = None

    def note_pull(self, value: tf.Tensor) -> None:
        """Notes a value that a worker reads."""
        if ops.get_default_graph() is self._graph:
            self._pulled.append(value)

    def note_push(self, gradients: Any, operations: Iterable[tf.Operation]) -> None:
        """Notes that gradients have been pushed, by some operations."""
        leaves = [g for g in tf.nest.flatten(gradients, expand_composites=True) if g is not None]
        self.end_of_pulls(leaves)
        ready = time_after(leaves)
        by_server: dict[str, list[tf.Operation]] = {}
        for operation in operations:
            if not operation.outputs and "/job:ps" in operation.device:
                by_server.setdefault(operation.device, []).append(operation)
        done = []
        for device, updates in by_server.items():
            # One message from each server instead of one for each variable.
            with tf.device(device), tf.control_dependencies(updates):
                done.append(tf.no_op())
        if len(done) > 1:
            for device, one in zip(by_server, done):
                end = time_after([ready.op, one])
                self._add(Part(SEND, server_of(device)), end - ready)
        end = time_after([ready.op, *done])
        self._add(Part(SEND), end - ready)
        self._begin = end if ops.get_default_graph() is self._graph else None

    def end_of_pulls(self, results: Sequence[tf.Tensor]) -> None:
        """Counts the time until all noted reads have arrived, and restarts for later ones.

        Reads that the function's results do not need are pruned from the graph, and waiting for
        them would execute them.
        """
        needed = set(sources(results)) if self._pulled else ()
        pulled, begin = [v for v in self._pulled if v.op in needed], self._begin
        self._pulled, self._begin = [], None
        if not pulled or begin is None:
            return
        is_here = ops.get_default_graph() is self._graph
        with contextlib.nullcontext() if is_here else self._graph.as_default():
            arrival = self._arrival_of(pulled)
            self._add(Part(READ), time_after([arrival]) - begin)
            by_server = _sent_by_servers(pulled)
            for server, sent in by_server.items() if len(by_server) > 1 else ():
                here = time_after([self._arrival_of(sent, server)])
                self._add(Part(READ, server), here - begin)
            if self.at_arrival is not None:
                self.at_arrival(arrival)

    def _arrival_of(self, values: Iterable[tf.Tensor], server: str | None = None) -> tf.Operation:
        """An operation on the worker that has needed the values themselves.

        TensorFlow takes out what only control dependencies hang on, and would wait for the servers'
        reading, not for the values' coming.
        """
        if server not in self._arrivals:
            with ops.control_dependencies(None), ops.device(None):
                handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    [None], tf.float32, context.anonymous_name(), "arrivals", True
                )
            run_apart(handle.op)
            self._arrivals[server] = handle
        firsts = [tf.cast(tf.reshape(value, [-1])[:1], tf.float32) for value in values]
        handle = self._arrivals[server]
        arrival = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.concat(firsts, 0))
        run_apart(arrival)
        return arrival


def server_of(device: str) -> str | None:
    """Name of the parameter server that a device is on, or None."""
    found = re.search(r"/job:ps/.*task:(\d+)", device)
    return task_name("ps", int(found[1])) if found else None


def _sent_by_servers(values: Iterable[tf.Tensor]) -> dict[str, list[tf.Tensor]]:
    """The largest tensors that each server sends for some values."""
    waiting, seen = list(values), set[int]()
    sent: dict[str, list[tf.Tensor]] = {}
    while waiting:
        tensor = waiting.pop()
        server = server_of(tensor.op.device)
        if id(tensor.op) in seen or tensor.dtype in (tf.resource, tf.variant, tf.string):
            continue
        if server is None:
            seen.add(id(tensor.op))
            waiting += tensor.op.inputs
        else:
            sent.setdefault(server, []).append(tensor)
    for server, found in sent.items():
        found.sort(key=lambda tensor: tensor.shape.num_elements() or 0)
        sent[server] = found[-_SHOWN:]
    return dict(sorted(sent.items()))
