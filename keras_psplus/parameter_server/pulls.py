"""Variables on parameter servers, whole and in shards, and a worker function's reads of them.

Every read of a variable on a parameter server copies its whole value over the network: a read in an
RNN's loop at each time step, one by a regulariser in addition to the layer's. While a worker
function is traced, reads are cached and reused until an operation writes to the variable; reads in
loops are moved before the loop. Small variables of one server are read together. Trainable
variables may be sent compressed; an update runs on the variable's server and uses its exact value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import ByVariable, Compressor, methods
from keras_psplus.compression.methods import IDENTITY
from keras_psplus.core.base.threads import ThreadFlag, ThreadValue
from keras_psplus.core.batch.replica_step import Key, current_step
from keras_psplus.core.graph.variables import record_read
from keras_psplus.parameter_server import traffic, worker_function
from keras_psplus.parameter_server.worker_function import SMALL_BYTES, writes
from keras_psplus.tf_internals import auto_control_deps_utils as resource_inputs
from keras_psplus.tf_internals import control_flow_func_graphs as control_flow
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import func_graph, record, resource_variable_ops
from keras_psplus.tf_internals.composite_variable import WrittenVariable

# Compressors of variables' gradients and of their values.


_FOR_VALUES = (
    'None, "bf16", "fp16", "int8", `Cast`, `Int8`, a `ByVariable` or dict of these, or a '
    "compressor of your own with `supports_values = True`"
)


class Compressors:
    def __init__(
        self,
        push: Compressor | str | dict[Any, Any] | None,
        pull: Compressor | str | dict[Any, Any] | None,
    ) -> None:
        push = compression.get(push)
        for compressor in methods.each(push):
            _check_that_it_encodes("compression", compressor)
        self._push = compression.with_error_feedback(push)
        pull = compression.get(pull, "pull_compression", _FOR_VALUES)
        for compressor in methods.each(pull):
            _check_that_it_encodes("pull_compression", compressor)
            _check_that_it_serves_values(compressor)
        if pull is not None and not isinstance(pull, ByVariable):
            # Small variables cost their message, not their bytes, and vectors are those that
            # suffer: biases, and the scales and shifts of normalisations.
            pull = ByVariable({}, default=pull)
        self._pull = pull

    def of_gradient(self, variable: tf.Variable) -> Compressor | None:
        """The compressor of a variable's gradient, with error feedback if it needs it, or None."""
        return _chosen(self._push, variable)

    def of_value(self, variable: tf.Variable) -> Compressor | None:
        """The compressor that a worker reads a variable through, or None.

        Only what was made to be trained is read so. Other variables are optimizers' own, or, as the
        averages of BatchNormalization, written again with a small change, which rounding would
        swallow.
        """
        if self._pull is None or not variable.trainable:
            return None
        compressor = _chosen(self._pull, variable)
        if compressor is not None:
            # It may be one that `for_variable` has made just now.
            _check_that_it_serves_values(compressor)
        return compressor


def path_of(variable: tf.Variable) -> str:
    return getattr(variable, "keras_path", None) or variable.name.split(":")[0]


def _chosen(compressor: Compressor | None, variable: tf.Variable) -> Compressor | None:
    if compressor is None or not variable.dtype.is_floating:
        return None
    return compressor.for_variable(path_of(variable), variable.shape, variable.dtype)


def _check_that_it_encodes(argument: str, compressor: Compressor) -> None:
    method = methods.missing(compressor, "encode", "decode")
    if method:
        raise ValueError(
            f"`{argument}` must have `encode` and `decode`: on the way between a worker and a "
            "parameter server there are no rounds in which workers average. "
            f"Received: {argument}={compressor!r}, without `{method}`"
        )


def _check_that_it_serves_values(compressor: Compressor) -> None:
    if not compressor.supports_values:
        raise ValueError(
            "`pull_compression` must keep every element of a variable nearly as it is, at every "
            f"read: {_FOR_VALUES}. Signs, some of the elements and low ranks are for gradients, "
            "whose sum over steps counts (`compression`). "
            f"Received: pull_compression={compressor!r}"
        )


# Reads belong to no step of an optimizer; evaluation has none.
_STEP = 0
# Operations that read rows of a variable.
GATHERS = ("ResourceGather", "ResourceGatherNd")


def parts_of(variable: tf.Variable) -> list[tf.Variable]:
    return getattr(variable, "shards", [variable])


def raw_read(variable: tf.Variable) -> tf.Tensor:
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    value.set_shape(variable.shape)
    return value


def read(parts: Sequence[tf.Variable], compressor: Compressor | None, key: Key) -> tf.Tensor:
    """Brings a variable's value to the worker."""
    values = [_decode(_encode(part, compressor, key), part, compressor) for part in parts]
    return values[0] if len(parts) == 1 else tf.concat(values, 0)


def groups(variables: Sequence[tf.Variable]) -> list[list[int]]:
    """Places of the variables that `read_together` brings: small ones of a server, others alone."""
    found: dict[str | int, list[int]] = {}
    for place, variable in enumerate(variables):
        is_small = traffic.size_in_bytes([variable]) <= worker_function.SMALL_BYTES
        found.setdefault(variable.device if is_small else place, []).append(place)
    return list(found.values())


def read_together(
    variables: Sequence[tf.Variable], compressors: Sequence[Compressor | None], keys: Sequence[Key]
) -> list[tf.Tensor]:
    """Reads whole variables or shards of one server, small ones in one message."""
    payloads = [_encode(*one) for one in zip(variables, compressors, keys)]
    tensors = [tensor for payload in payloads for tensor in payload]
    with ops.device(variables[0].device):
        arrived = iter(worker_function.send_coalesced(tensors, [None] * len(tensors)))
    own = [[next(arrived) for _ in payload] for payload in payloads]
    return [_decode(*one) for one in zip(own, variables, compressors)]


def gather(
    variable: tf.Variable, rows: tf.Tensor, compressor: Compressor | None, key: Key
) -> tf.Tensor:
    row_shape, dtype = variable.shape[1:], variable.dtype
    values = tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=rows, dtype=dtype, validate_indices=True
    )
    row_bytes = compressed = row_shape.num_elements() * dtype.size
    if compressor is not None:
        with ops.device(variable.device):
            payload = compressor.encode_rows(values, _STEP)
        compressed = compressor.row_bytes(row_shape, dtype)
        values = compressor.decode_rows(payload, row_shape, dtype, _STEP)
    # With what is asked for.
    count, asked = tf.size(rows, tf.int64), rows.dtype.size
    if worker_function.handle_of(variable) is None:
        traffic.count(key, count * (row_bytes + asked), count * (compressed + asked))
    return values


def key_of(variable: tf.Variable, compressor: Compressor | None) -> Key:
    return path_of(variable), "pull", None if compressor is None else repr(compressor)


def _encode(variable: tf.Variable, compressor: Compressor | None, key: Any) -> tuple[Any, ...]:
    with ops.device(variable.device):
        value, compressor = raw_read(variable), compressor or IDENTITY
        state = compressor.init(value.shape, value.dtype)
        if tf.nest.flatten(state):
            raise ValueError(
                "`pull_compression` cannot keep a state: a server serves all workers alike. "
                f"Received: pull_compression={compressor!r}, whose `init` returned {state!r}"
            )
        payload, _ = compressor.encode(value, state, _STEP)
    if worker_function.handle_of(variable) is None:
        traffic.count(
            key, traffic.size_in_bytes([value]), traffic.size_in_bytes(payload), payload[0]
        )
    return payload


def _decode(
    payload: Sequence[tf.Tensor], variable: tf.Variable, compressor: Compressor | None
) -> tf.Tensor:
    used = compressor or IDENTITY
    return used.decode(tuple(payload), variable.shape, variable.dtype, _STEP)


def lookup(
    variable: tf.Variable,
    shape: tf.TensorShape,
    indices: Any,
    read_rows: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Gathers rows of a variable, of a whole shape; `read_rows` brings each distinct row once."""
    resource_variable_ops.variable_accessed(variable)
    indices = tf.convert_to_tensor(indices)
    row_shape = shape[1:]
    with record.stop_recording():
        unique, positions = tf.unique(tf.reshape(indices, [-1]))
        rows = tf.gather(read_rows(unique), positions)
        rows = tf.reshape(rows, tf.concat([tf.shape(indices), row_shape.as_list()], 0))
        rows.set_shape(indices.shape.concatenate(row_shape))

    def backward(gradient: tf.Tensor) -> list[tf.IndexedSlices]:
        # Repeated rows stay apart, as Keras's optimizers get them in one process; see
        # `duplicate_rows`, which may sum them before they are sent.
        values = tf.reshape(gradient, [-1, *row_shape.as_list()])
        whole = tf.constant(shape.as_list(), tf.int64)
        return [tf.IndexedSlices(values, tf.reshape(indices, [-1]), whole)]

    record.record_operation(
        "ResourceGather",
        [rows],
        [variable.handle],
        backward_function=backward,
        forward_function=None,
    )
    return rows


# A variable's shards, or itself.
Parts: TypeAlias = Sequence[tf.Variable]
_LOOPS = (control_flow.WhileBodyFuncGraph, control_flow.WhileCondFuncGraph)
_WRITING_METHODS = (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update", "_restore_from_tensors"),
    *(f"scatter_{how}" for how in ("add", "sub", "max", "min", "mul", "div", "update")),
    *(f"scatter_nd_{how}" for how in ("add", "sub", "max", "min", "update")),
)
# Raised while worker functions read exact values: those that are to be written again.
exact_reads_flag = ThreadFlag()


# The pulls of the worker function that a thread is tracing.
current_pulls: ThreadValue[Pulls] = ThreadValue()
# The device of the server that an update runs on, of the variable that it updates.
updating_device: ThreadValue[str] = ThreadValue()


class WholeRead(NamedTuple):
    variable: tf.Variable
    parts: Parts
    compressor: Compressor | None


class Pulls:
    """Reads of a worker function, while it is traced.

    When one of the variables `together` is read, those of its server are. Those whose ids are in
    `stay` a loop both reads and writes: reads stay in the loop. `whole_reads` is by variables' ids.
    """

    def __init__(
        self,
        together: Iterable[tf.Variable] = (),
        stay: Container[int] = (),
        compressors: Compressors | None = None,
    ) -> None:
        self._stay = stay
        self.whole_reads: dict[int, WholeRead] = {}
        self._compressors = compressors
        self._values: dict[tuple[int, int, bool], tf.Tensor] = {}
        self._readers: dict[int, set[int]] = {}
        self._written: set[tuple[int, int]] = set()
        self._seen: dict[int, tuple[tf.Graph | None, int]] = {}
        self._read_ahead: list[tuple[tf.Variable, list[tf.Tensor], tf.Graph]] = []
        self._groups: dict[tuple[str, tf.DType], list[tf.Variable]] = {}
        for variable in together:
            is_whole = isinstance(variable, PulledVariable)
            if is_whole and traffic.size_in_bytes([variable]) <= SMALL_BYTES:
                group = self._groups.setdefault((variable.device, variable.dtype), [])
                group.append(variable)

    def value(self, variable: tf.Variable, parts: Parts, needs_function: bool = False) -> tf.Tensor:
        """A variable's value as of now, on the worker; for the tape, outside of conditionals."""
        resource_variable_ops.variable_accessed(variable)
        with record.stop_recording():
            value = self._find_or_read(variable, parts, needs_function)
        # Reads that are shared, or lie outside of the loop, are not the tape's own.
        record_read(variable, value)
        return value

    def compressor_of(self, variable: tf.Variable) -> Compressor | None:
        if self._compressors is None or exact_reads_flag:
            return None
        if worker_function.handle_of(parts_of(variable)[0]) is not None:
            return None
        return self._compressors.of_value(variable)

    def _find_or_read(self, variable: tf.Variable, parts: Parts, needs_function: bool) -> tf.Tensor:
        handles = [part.handle for part in parts]
        graphs = _graphs_outwards()
        for graph in graphs:
            self._look_for_writes(graph)
        loops: list[tuple[tf.Graph, tf.Graph]] = []
        for graph, outer in zip(graphs, [*graphs[1:], None]):
            value = self._values.get(self._key(graph, variable))
            if value is not None:
                break
            is_loop = isinstance(graph, _LOOPS)
            if (
                outer is None
                or self._is_written(graph, handles)
                or (is_loop and id(variable) in self._stay)
            ):
                around = loops[-1][1] if loops else graphs[0]
                home = graph if needs_function else around
                value = self._read(variable, parts, home)
                break
            if is_loop:
                loops.append((graph, outer))
        self._read_ahead += [(variable, handles, loop) for loop, _ in loops]
        return value

    def _read(self, variable: tf.Variable, parts: Parts, home: tf.Graph) -> tf.Tensor:
        group = self._groups.get((variable.device, variable.dtype), ())
        others = [v for v in group if self._key(home, v) not in self._values]
        # In a branch or a loop most of a group may not be needed.
        together = any(v is variable for v in others) and not _is_control_flow(home)
        wanted = others if together else [variable]
        compressors = [self.compressor_of(v) for v in wanted]
        keys = [key_of(v, compressor) for v, compressor in zip(wanted, compressors)]
        with _in(home), ops.control_dependencies(None), ops.device(None):
            if together:
                values = read_together(wanted, compressors, keys)
            else:
                values = [read(parts, compressors[0], keys[0])]
            for other, compressor, value in zip(wanted, compressors, values):
                of_other = parts if other is variable else [other]
                self._keep(home, other, of_other, value)
                if not exact_reads_flag:
                    self.whole_reads[id(other)] = WholeRead(other, of_other, compressor)
            value = self._values[self._key(home, variable)]
            if (counter := traffic.current_counter()) is not None and variable.trainable:
                counter.timer.note_pull(value)
        return value

    def _key(self, graph: tf.Graph, variable: tf.Variable) -> tuple[int, int, bool]:
        return id(graph), id(variable), self.compressor_of(variable) is None

    def _is_written(self, graph: tf.Graph, handles: Iterable[tf.Tensor]) -> bool:
        return any((id(graph), id(handle)) in self._written for handle in handles)

    def keep(self, variable: tf.Variable, parts: Parts, value: tf.Tensor) -> None:
        """Caches a variable's value for the function being traced, which then reads none."""
        self._keep(ops.get_default_graph(), variable, parts, value)

    def _keep(self, graph: tf.Graph, variable: tf.Variable, parts: Parts, value: tf.Tensor) -> None:
        self._values[self._key(graph, variable)] = value
        for part in parts:
            self._readers.setdefault(id(part.handle), set()).add(id(variable))

    def _look_for_writes(self, graph: tf.Graph) -> None:
        """Forgets what operations made since the last look have written to."""
        _, count = self._seen.get(id(graph), (None, 0))
        made = graph.get_operations()
        # The graph is kept, or another could get its id.
        self._seen[id(graph)] = graph, len(made)
        written = written_by(made[count:], graph)
        self._written |= {(id(graph), handle) for handle in written}
        stale = set().union(*(self._readers.get(handle, ()) for handle in written))
        if stale:
            self._values = {key: v for key, v in self._values.items() if key[1] not in stale}

    def written_in_loops(self) -> set[int]:
        """Ids of variables that were read before a loop that writes to them."""
        written = {}
        for _, _, loop in self._read_ahead:
            if id(loop) not in written:
                written[id(loop)] = written_by(loop.get_operations(), loop)
        return {
            id(variable)
            for variable, handles, loop in self._read_ahead
            if any(id(handle) in written[id(loop)] for handle in handles)
        }


class PulledVariable(resource_variable_ops.ResourceVariable):
    @property
    def handle(self) -> tf.Tensor:
        copy = worker_function.handle_of(self)
        return self._handle if copy is None else copy

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        pulls = current_pulls()
        if pulls is None or updating_device() == self.device:
            return super()._read_variable_op(no_copy)
        return as_read(self, pulls.value(self, [self]))

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        pulls = current_pulls()
        if pulls is None or updating_device() == self.device or is_in_inner_function():
            return super().sparse_read(indices, name)
        compressor = pulls.compressor_of(self)
        key = key_of(self, compressor)
        rows = lookup(self, self.shape, indices, lambda rows: gather(self, rows, compressor, key))
        return as_read(self, rows)


def as_read(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
    """A value that was read, as the step that is traced may see it."""
    step = current_step()
    return value if step is None else step.as_read(variable, value)


def _noting(name: str) -> Callable[..., Any]:
    """A method that writes, and says so."""
    original = getattr(resource_variable_ops.ResourceVariable, name)

    @functools.wraps(original)
    def method(self: PulledVariable, *args: Any, **kwargs: Any) -> Any:
        if current_pulls() is None:
            writes.note()
        return original(self, *args, **kwargs)

    return method


for _name in _WRITING_METHODS:
    setattr(PulledVariable, _name, _noting(_name))


def is_in_inner_function() -> bool:
    """Whether the function that is being traced is called by another one."""
    function = _graphs_outwards()[-1]
    return isinstance(function, func_graph.FuncGraph) and isinstance(
        function.outer_graph, func_graph.FuncGraph
    )


def _is_control_flow(graph: tf.Graph) -> bool:
    return isinstance(graph, control_flow.ControlFlowFuncGraph)


def _graphs_outwards() -> list[tf.Graph]:
    """The current graph and its outer graphs, up to the function around control flow."""
    graphs = [ops.get_default_graph()]
    while _is_control_flow(graphs[-1]):
        graphs.append(graphs[-1].outer_graph)
    return graphs


def _in(graph: tf.Graph) -> contextlib.AbstractContextManager[Any]:
    # Entering the current graph again would cut it off from its own devices.
    return contextlib.nullcontext() if graph is ops.get_default_graph() else graph.as_default()


def uses(graph: Any) -> Iterator[tuple[tf.Operation, Any]]:
    """Operations of a function paired with the handles that they use, outer ones if captured."""
    outside = {id(inside): external for external, inside in graph.captures}
    for op in graph.get_operations():
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                yield op, outside.get(id(tensor), tensor)


def written_by(operations: Iterable[tf.Operation], graph: tf.Graph) -> set[int]:
    """Ids of the outermost handles that operations of a graph may write to."""
    handles: set[int] = set()
    for operation in operations:
        if any(tensor.dtype == tf.resource for tensor in operation.inputs):
            handles.update(
                id(_outermost(tensor, graph))
                for tensor in resource_inputs.get_read_write_resource_inputs(operation)[1]
            )
    return handles


def _outermost(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    """Tensor outside of all capturing functions that an operation's input stands for."""
    while isinstance(graph, func_graph.FuncGraph):
        outer = next((ext for ext, internal in graph.captures if internal is tensor), None)
        if outer is None:
            break
        tensor, graph = outer, getattr(outer, "graph", None)
    return tensor


# One variable whose rows lie on several parameter servers.
#
# TensorFlow's own `ShardedVariable` is a list of variables to Keras 3: it has no handle for the
# tape, and an optimizer cannot make slots for it. This one is a single variable to both; the rows
# that a lookup needs are gathered on their servers, and an update runs on each shard's server.


# While an update runs shard by shard: the number of the shard that sharded variables are.
current_shard: ThreadValue[int] = ThreadValue()


class ShardParts(tuple[Any, ...]):
    """An update's argument that is in parts already, one for each shard."""


class ShardedVariable(WrittenVariable):
    """A variable split along axis 0 over parameter servers, from TensorFlow's own one."""

    def __init__(self, sharded: Any) -> None:
        self._sharded = sharded
        self.shards = sharded.variables
        self.offsets = [offset[0] for offset in sharded._var_offsets]
        first = self.shards[0]
        self.keras_path = getattr(first, "keras_path", None)
        super().__init__(
            first.trainable,
            sharded.shape,
            sharded.dtype,
            sharded._unique_id,
            first.name.split("/part_")[0],
        )

    def _shard(self) -> tf.Variable | None:
        index = current_shard()
        return None if index is None else self.shards[index]

    def _shard_or_first(self) -> tf.Variable:
        return self.shards[current_shard() or 0]

    @property
    def handle(self) -> tf.Tensor:
        # The tape knows the variable by this.
        return self._shard_or_first().handle

    @property
    def device(self) -> str:
        return self._shard_or_first().device

    @property
    def shape(self) -> tf.TensorShape:
        shard = self._shard()
        return self._whole_shape if shard is None else shard.shape

    def value(self) -> tf.Tensor:
        """The whole value, or the shard's while `current_shard` is one."""
        shard = self._shard()
        if shard is not None:
            return shard.value()
        self._refuse_inner_functions()
        pulled = current_pulls() or Pulls()
        # The tape knows the first handle only: a conditional's or a loop's gradient goes to what
        # its body captures, which has to be the value and not the shards' handles.
        return as_read(self, pulled.value(self, self.shards, needs_function=True))

    def _refuse_inner_functions(self) -> None:
        # A tape around the function would see shards only, not the variable that they are of.
        if is_in_inner_function():
            raise ValueError(
                "A variable that is sharded over parameter servers cannot be read inside a "
                "tf.function that the step calls: take the decorator off (`fit` compiles the whole "
                "step), or pass `variable_partitioner=None` to the strategy to keep variables "
                f"whole. Received: {self._handle_name}, shape={self._whole_shape}"
            )

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        shard = self._shard()
        if shard is not None:
            return shard.sparse_read(indices)
        self._refuse_inner_functions()
        return as_read(self, lookup(self, self._whole_shape, indices, self._rows))

    def _rows(self, unique: tf.Tensor) -> tf.Tensor:
        of_shards, owners = self._decompose(unique)
        places = tf.dynamic_partition(tf.range(tf.size(unique)), owners, len(self.shards))
        pulled = current_pulls()
        compressor = None if pulled is None else pulled.compressor_of(self)
        key = key_of(self, compressor)
        rows = [gather(part, own, compressor, key) for part, own in zip(self.shards, of_shards)]
        return tf.dynamic_stitch(places, rows)

    def _decompose(self, indices: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Row numbers by shard, of whatever sizes, and the shard of each."""
        starts = tf.constant(self.offsets[1:], indices.dtype)
        owners = tf.searchsorted(starts, indices, side="right")
        first = tf.gather(tf.constant(self.offsets, indices.dtype), owners)
        # Indices out of range belong to the first or the last shard, which says so.
        return tf.dynamic_partition(indices - first, owners, len(self.shards)), owners

    def _decompose_slices(self, slices: tf.IndexedSlices) -> list[tf.IndexedSlices]:
        of_shards, owners = self._decompose(slices.indices)
        values = tf.dynamic_partition(slices.values, owners, len(self.shards))
        return [
            tf.IndexedSlices(own, indices, tf.constant(part.shape.as_list(), indices.dtype))
            for own, indices, part in zip(values, of_shards, self.shards)
        ]

    def _write(self, method: str, value: Any) -> Any:
        shard = self._shard()
        if shard is not None:
            return getattr(shard, method)(value)
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        for part, first in zip(self.shards, self.offsets):
            getattr(part, method)(value[first : first + part.shape[0]])
        return self

    def _scatter(self, method: str, slices: tf.IndexedSlices) -> Any:
        shard = self._shard()
        if shard is not None:
            return getattr(shard, method)(slices)
        for part, own in zip(self.shards, self._decompose_slices(slices)):
            getattr(part, method)(own)
        return self

    def __repr__(self) -> str:
        return f"<ShardedVariable shape={self._whole_shape} shards={len(self.shards)}>"

    def split(self, argument: Any) -> list[Any]:
        if isinstance(argument, ShardParts):
            return list(argument)
        if isinstance(argument, tf.IndexedSlices):
            return self._decompose_slices(argument)
        # A gradient may come without a static shape; a learning rate is known to be a scalar.
        if isinstance(argument, tf.Tensor) and argument.shape.is_compatible_with(self._whole_shape):
            argument = tf.ensure_shape(argument, self._whole_shape)
            return [
                argument[first : first + part.shape[0]]
                for part, first in zip(self.shards, self.offsets)
            ]
        if isinstance(argument, tf.Tensor) and argument.shape.rank != 0:
            raise ValueError(
                "An update of a sharded variable takes scalars and tensors of its own shape; pass "
                "`variable_partitioner=None` to the strategy to keep variables whole. "
                f"Received: shape={argument.shape} for {self}"
            )
        return [argument] * len(self.shards)
