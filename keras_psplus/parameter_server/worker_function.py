"""Worker functions, which run one or several steps without state.

Metric states and seeds live on the chief. A worker function receives their values with its
arguments, changes copies of them that last as long as the call, and returns its increments. That
costs no round trips, every step is counted exactly once however workers fail, and a restarted
worker has nothing to restore.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus.compression import wire
from keras_psplus.core.base.threads import ThreadFlag, ThreadValue
from keras_psplus.core.graph.metrics import added
from keras_psplus.tf_internals import context, execute, executor, resource_variable_ops
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import types_core as core

# Operations and functions that the chief runs on a worker.


CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


@contextlib.contextmanager
def on_worker(index: int, device: str | None = "CPU:0") -> Iterator[None]:
    """Context in which operations run on a worker, one after another.

    The device None leaves that to TensorFlow, as steps do.
    """
    task = f"/job:worker/replica:0/task:{index}"
    own = executor.new_executor(enable_async=False)
    try:
        with context.executor_scope(own), tf.device(f"{task}/device:{device}" if device else task):
            yield
    finally:
        # The end of data is an error to the executor, which would raise it once more.
        own.clear_error()


def call(
    concrete: tf.types.experimental.ConcreteFunction, *args: Any, cancellation: Any = None
) -> list[tf.Tensor]:
    """Calls a concrete function eagerly; returns its outputs, flat.

    TensorFlow keeps what cancels a call where any thread's next call finds it. Here it is the
    call's own.
    """
    own, flat = context.context(), tf.nest.flatten(args, expand_composites=True)
    options = own.function_call_options.as_attrs().items()
    called = {
        "num_outputs": len(concrete.outputs),
        "inputs": [*(leaf for leaf in flat if leaf is not None), *concrete.captured_inputs],
        "attrs": tuple(itertools.chain(*options)),
        "ctx": own,
    }
    name = concrete.name.decode()
    if cancellation is None:
        return execute.execute(name, **called)
    return execute.execute_with_cancellation(name, **called, cancellation_manager=cancellation)


def to_chief(tensor: tf.Tensor) -> tf.Tensor:
    """Copies a worker's tensor into the chief's memory: workers do not talk to each other."""
    with tf.device(CHIEF):
        # `tf.identity` and `cpu` raise RuntimeError if the worker is lost.
        return tf.raw_ops.Identity(input=tensor)


# Brings tensors from one task to others in few messages.


# Below this a message costs more than its bytes.
SMALL_BYTES = 32 << 10


def send_coalesced(tensors: Sequence[tf.Tensor], devices: Sequence[str | None]) -> list[tf.Tensor]:
    """Sends tensors to other tasks: small ones to the same one in a single message.

    Whatever uses a large tensor has to be put on its device; that is where it is sent to then. A
    device is None for the worker that runs the function. Small tensors are returned on their
    devices, others as they were.
    """
    arrived = list(tensors)
    groups: dict[str | None, list[int]] = {}
    for i, (tensor, device) in enumerate(zip(tensors, devices)):
        if _is_small(tensor):
            groups.setdefault(device, []).append(i)
    for device, places in groups.items():
        if len(places) == 1:
            continue
        group = [tensors[i] for i in places]
        words = wire.pack(group)
        with tf.device(device):
            for i, tensor in zip(places, wire.unpack(words, group)):
                arrived[i] = tf.ensure_shape(tensor, tensors[i].shape)
    return arrived


def send_in_turn(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """As `send_coalesced`, but large tensors reach each device one after the other.

    All together, they would share the link, and none would be there before almost all are. The last
    ones, whose gradients come first, begin.
    """
    gated = list(tensors)
    before: dict[str, list[tf.Tensor]] = {}
    for i in reversed(range(len(tensors))):
        if _is_small(tensors[i]):
            continue
        earlier = before.setdefault(devices[i], [])
        # While one is on its way, the next one's first bytes are, too.
        with ops.control_dependencies([t.op for t in earlier[-2:-1]]), ops.device(None):
            # Not an identity, past which TensorFlow would lead the tensor.
            own = tf.raw_ops.EnsureShape(input=tensors[i], shape=tensors[i].shape)
        with tf.device(devices[i]):
            gated[i] = tf.raw_ops.EnsureShape(input=own, shape=tensors[i].shape)
        earlier.append(gated[i])
    return send_coalesced(gated, devices)


def _is_small(tensor: tf.Tensor) -> bool:
    size = tensor.shape.num_elements()
    # Of what is shorter than a byte, or complex, there are no words.
    can_be_packed = tensor.dtype.is_floating or tensor.dtype.is_integer
    return can_be_packed and size is not None and size * tensor.dtype.size <= SMALL_BYTES


# TensorFlow raises the same classes for a lost task and for a step's own error. What tells them
# apart is the text: the job of the task whose RPC has failed, and phrases about a process that has
# taken a lost one's place.


_FROM_SERVER = "GRPC error information from remote target /job:ps"
_WORKER = "/job:worker"
# Of a process that has taken the address of a lost one before any RPC has failed, or that the chief
# is just about to connect to.
_RESTARTED = (
    *("unknown device", "unable to find the relevant tensor remote_handle"),
    "client for target /job:worker",
)
# Of a tensor of a lost worker that TensorFlow has been made to forget.
_FORGOTTEN = "Assigned device '/job:worker"
# Of a function that starts while a worker is taken back; it has not run.
_NOT_REMOTE = "Primary device is not remote"
_NOT_REGISTERED = "is neither a type of a primitive operation nor a name of a function registered"


def is_server_loss(error: BaseException) -> bool:
    """Whether an error says that a parameter server is lost, or cannot be reached."""
    if _FROM_SERVER not in str(error):
        return False
    return isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)) or (
        isinstance(error, tf.errors.InvalidArgumentError) and _is_restarted(error)
    )


def is_worker_loss(error: BaseException) -> bool:
    """Whether an error says that a worker is lost, or was started again."""
    text = str(error)
    if _WORKER not in text or _FROM_SERVER in text:
        return False
    if isinstance(error, tf.errors.InvalidArgumentError):
        return _is_restarted(error) or _NOT_REMOTE in text
    if isinstance(error, tf.errors.InternalError):
        return _FORGOTTEN in text
    if isinstance(error, tf.errors.NotFoundError):
        return _NOT_REGISTERED in text
    if isinstance(error, TypeError):
        return "Binding inputs to tf.function" in text
    return isinstance(
        error, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
    )


def is_of_worker(error: BaseException) -> bool:
    """Whether an operation of the chief has failed as its worker is unreachable or new."""
    if not isinstance(error, tf.errors.OpError):
        return False
    # Of something that was on a worker before it was started again.
    restarted = "have been restarted" in error.message or "invalid device" in error.message
    return restarted or is_worker_loss(as_loss(error, _WORKER))


def as_loss(error: tf.errors.OpError, device_name: str) -> tf.errors.OpError:
    """Names the worker in an error of its connection, which may name none.

    Args:
        error: What a closure has raised; it is returned if it is another one.
    """
    is_lost = isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError))
    if isinstance(error, tf.errors.InvalidArgumentError):
        is_lost = _is_restarted(error) or _NOT_REMOTE in error.message
    # An operation of a step names its node, and a connection to another task that task.
    if is_lost and "{{" not in error.message and "/job:" not in error.message:
        return tf.errors.UnavailableError(None, None, f"{device_name}: {error.message}")
    return error


def _is_restarted(error: BaseException) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in _RESTARTED)


# Short messages for errors of a step on a worker, with its batch.
#
# TensorFlow reports the same error from the worker and from each server it spoke to, every time
# with the whole stack of Keras: hundreds of lines, without the batch.


_OF_STEPS = (
    tf.errors.InvalidArgumentError,
    tf.errors.FailedPreconditionError,
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
)
_FRAME = re.compile(r'^ *(File "(.*)", line \d+, in .*)$', re.MULTILINE)
_LIBRARIES = [
    str(pathlib.Path(str(m.__file__)).resolve().parent) for m in (tf, keras, keras_psplus)
]
# Modules between a library's function and the script's.
_BETWEEN = [str(pathlib.Path(str(m.__file__)).resolve()) for m in (contextlib, threading)]


def is_of_step(error: BaseException) -> bool:
    """Whether an error comes from what a step computes, not from the cluster."""
    return (
        isinstance(error, _OF_STEPS)
        and "have been restarted" not in error.message
        and not is_worker_loss(error)
        and not is_server_loss(error)
    )


_COMPILED = (
    "What `tf.function(jit_compile=True)` compiles cannot read a variable of a parameter server: "
    "take the argument off, or read the variable before and pass its value."
)


def translate_error(error: tf.errors.OpError, task: str, about: str) -> tf.errors.OpError:
    """The error of a step, in few words, of the same class."""
    text = error.message
    first_stack = text.split("Detected at node", 2)[1:2]
    frames = _FRAME.findall("".join(first_stack))
    frames = [frame for frame, path in frames if not _is_library(path)]
    rest = text[max((m.end() for m in _FRAME.finditer(text)), default=0) :]
    cause = re.split(r"\[\[|Additional GRPC|\n\s*\(1\)", _without_counts(rest))[0].strip()
    node = re.search(r"\{\{node ([^}]+)\}\}", rest)
    lines = [
        cause or text.splitlines()[0],
        *([_COMPILED] if "tfvariable_on_a_different_device" in text else ()),
        f"In {node.group(1)}, run by {task}." if node else f"On {task}.",
        *(f"  {frame}" for frame in frames),
        f"Training has stopped. Received: {about}",
    ]
    return type(error)(None, None, "\n".join(lines))


def _is_library(path: str) -> bool:
    """Whether a file is one of TensorFlow, Keras or this library."""
    path = str(pathlib.Path(path).resolve())
    return path in _BETWEEN or any(path.startswith(folder + os.sep) for folder in _LIBRARIES)


def _without_counts(text: str) -> str:
    return re.sub(r"^\s*(\d+ root error\(s\) found\.\s*\(0\)\s*)?([A-Z_]+:)?\s*", "", text)


# Batches concatenated into one tensor of each kind, to send fewer messages.


class JoinedBatches:
    """Batches end to end; as long as there are batches.

    Args:
        whole: Structure of tensors, as of a batch, but of the rows of all batches.
        rows: Int64 tensor: for each tensor of a batch, how many rows each batch has.
    """

    def __init__(self, whole: Any, rows: tf.Tensor) -> None:
        self.whole, self.rows = whole, rows

    def __len__(self) -> int:
        return self.rows.shape[1]

    @property
    def payload(self) -> dict[str, Any]:
        """Tensors that are sent, or stay on a worker."""
        return {"whole": self.whole, "rows": self.rows}


Batches = Sequence[Any] | JoinedBatches


def first_of(batches: Batches) -> Any:
    """The first batch of a list; all rows of joined batches."""
    return batches.whole if isinstance(batches, JoinedBatches) else batches[0]


def can_be_joined(batches: Sequence[Any]) -> bool:
    """Whether a list of batches is of several that fit end to end."""
    if len(batches) == 1:
        return False
    forms = [[_row_form(leaf) for leaf in tf.nest.flatten(batch)] for batch in batches]
    return None not in forms[0] and all(form == forms[0] for form in forms)


def _row_form(leaf: Any) -> tuple[tf.DType, list[int | None]] | None:
    is_dense = isinstance(leaf, tf.Tensor) and leaf.shape.rank
    return (leaf.dtype, leaf.shape[1:].as_list()) if is_dense else None


def join(batches: Sequence[Any]) -> JoinedBatches:
    """Joins a list of batches that `can_be_joined`."""
    rows = np.transpose([[len(leaf) for leaf in tf.nest.flatten(batch)] for batch in batches])
    whole = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
    return JoinedBatches(whole, tf.constant(rows, tf.int64))


def spec_of(batches: JoinedBatches, batch_spec: Any) -> dict[str, Any]:
    """Type specification of the payload of joined batches."""
    return {
        "whole": tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), batch_spec
        ),
        "rows": tf.TensorSpec(batches.rows.shape, tf.int64),
    }


def separate(payload: Any, batch_spec: Any) -> list[Any]:
    """The list of batches of a `JoinedBatches.payload`, or of a list of batches."""
    if not isinstance(payload, dict):
        return payload
    parts = []
    for i, (leaf, spec) in enumerate(
        zip(tf.nest.flatten(payload["whole"]), tf.nest.flatten(batch_spec))
    ):
        pieces = tf.split(leaf, payload["rows"][i], num=payload["rows"].shape[1])
        parts.append([tf.ensure_shape(piece, spec.shape) for piece in pieces])
    return [tf.nest.pack_sequence_as(payload["whole"], batch) for batch in zip(*parts)]


_READS = ("ReadVariableOp", "VariableShape")
NOTHING_KEPT = -1
# The worker function that a thread is tracing.
current_trace: ThreadValue[Trace] = ThreadValue()


class Trace:
    """One tracing of a worker function.

    `initial` is a float64 vector, the values of the closure variables in the order in which the
    function comes upon them, and behind them the number of the run, if it has `tables`.

    Attributes:
        tables: Dynamic tables that the function keeps gradients for.
        kept: Sums and copies that the worker keeps from step to step. The `count` of each, a
            tensor, is of how many batches it has something that is not sent yet.
    """

    def __init__(self, initial: tf.Tensor) -> None:
        self._initial = initial
        self._graph = ops.get_default_graph()
        self._handles: dict[int, tf.Tensor] = {}
        # Names of the assignments of initial values.
        self._first_writes: set[str] = set()
        self._size = 0
        self.variables: list[ClosureVariable] = []
        self.tables: list[Any] = []
        self.kept: list[Any] = []

    def handle_of(self, variable: ClosureVariable) -> tf.Tensor:
        """The handle of the worker's own copy of a closure variable."""
        key = id(variable)
        if key not in self._handles:
            size = variable.shape.num_elements()
            # In the function itself, also if a branch of a tf.cond comes upon it first.
            with self._graph.as_default(), ops.control_dependencies(None), ops.device(None):
                handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    variable.shape, variable.dtype, context.anonymous_name(), "travelling", True
                )
                value = tf.reshape(self._initial[self._size : self._size + size], variable.shape)
                value = tf.cast(value, variable.dtype)
                first = tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            self._first_writes.add(first.name)
            self._size += size
            self._handles[key] = handle
            self.variables.append(variable)
        return self._handles[key]

    def keep(self, table: Any, name: str) -> tf.Tensor:
        """Notes that a gradient is kept for a table; returns the number of the run.

        Raises:
            ValueError: If that may happen in some runs only, or twice in one.
        """
        if ops.get_default_graph() is not self._graph or any(one is table for one in self.tables):
            raise ValueError(
                'With `mode="async"`, a step applies the gradient of a DynamicEmbedding\'s table '
                "once, and outside of loops, branches and functions of its own: the chief updates "
                "the rows once the step is back. A dynamic loss scale, as of mixed_float16, is "
                'such a branch: use mixed_bfloat16, or `mode="sync"`. '
                f"Received: the table '{name}'"
            )
        self.tables.append(table)
        return tf.cast(self._initial[-1], tf.int64)

    def overwritten(self) -> list[ClosureVariable]:
        """Closure variables, but for seeds, that are given values not made by adding."""
        return [v for v in self.variables if not v.is_seed and self._is_overwritten(v)]

    def _is_overwritten(self, variable: ClosureVariable) -> bool:
        handle = self._handles[id(variable)]
        # TensorFlow keeps no order of consumers.
        others = (op for op in handle.consumers() if op.name not in self._first_writes)
        writes = (op for op in others if op.type not in _READS)
        return not all(
            op.type in ("AssignAddVariableOp", "AssignSubVariableOp")
            or (op.type == "AssignVariableOp" and _adds_to(handle, op.inputs[1]))
            for op in writes
        )

    def pending(self) -> tf.Tensor:
        """Largest `count` of what is kept, or `NOTHING_KEPT`; a float64 vector of one number."""
        counts = [one.count for one in self.kept]
        pending = tf.reduce_max(tf.stack(counts)) if counts else NOTHING_KEPT
        return tf.cast(tf.reshape(pending, [1]), tf.float64)

    def changes(self) -> tf.Tensor:
        """Increments of the closure variables, a float64 vector."""
        values = [
            tf.reshape(
                tf.cast(
                    tf.raw_ops.ReadVariableOp(
                        resource=self._handles[id(variable)], dtype=variable.dtype
                    ),
                    tf.float64,
                ),
                [-1],
            )
            for variable in self.variables
        ]
        after = tf.concat([*values, tf.zeros([0], tf.float64)], 0)
        return added(after, self._initial[: self._size])


def _adds_to(handle: tf.Tensor, value: tf.Tensor) -> bool:
    """Whether a value is a sum of a variable's value and something else."""
    op = _source(value)
    if op.type not in ("Add", "AddV2", "Sub"):
        return False
    terms = op.inputs[:1] if op.type == "Sub" else op.inputs
    sources = [_source(term) for term in terms]
    return any(op.type == "ReadVariableOp" and op.inputs[0] is handle for op in sources)


def _source(tensor: tf.Tensor) -> tf.Operation:
    op = tensor.op
    while op.type in ("Identity", "Cast", "EnsureShape", "Reshape"):
        op = op.inputs[0].op
    return op


class ClosureVariable(resource_variable_ops.BaseResourceVariable, core.Tensor):
    """A small variable of the chief that worker functions get a copy of.

    Args:
        kind: `"total"`, a metric's state; `"seed"`, that of a seed generator, `(seed, counter)`; or
            `"state"`, of a layer that changes it in each step, such as BatchNormalization.
    """

    def __init__(self, variable: tf.Variable, kind: str) -> None:
        self._chief_variable = variable
        self.kind = kind
        super().__init__(
            trainable=False,
            shape=variable.shape,
            dtype=variable.dtype,
            handle=variable._handle,
            handle_name=variable.name.split(":")[0],
            unique_id=variable._unique_id,
            in_graph_mode=False,
            synchronization=tf.VariableSynchronization.NONE,
        )

    @property
    def is_seed(self) -> bool:
        return self.kind == "seed"

    @property
    def handle(self) -> tf.Tensor:
        trace = current_trace()
        return self._chief_variable._handle if trace is None else trace.handle_of(self)

    @property
    def device(self) -> str:
        return self._chief_variable.device

    @classmethod
    def _variable_call(cls, *args: Any, **kwargs: Any) -> None:
        # The metaclass of tf.Variable would hand the call to the strategy's creator.
        return None

    def _should_act_as_resource_variable(self) -> None:
        pass


def is_on_ps(variable: tf.Variable) -> bool:
    return "/job:ps/" in (getattr(variable, "device", None) or "")


def pack(variables: Sequence[ClosureVariable]) -> np.ndarray:
    """The chief's values of closure variables as one float64 vector."""
    return np.concatenate(
        [v._chief_variable.numpy().astype("float64").ravel() for v in variables] or [np.zeros(0)]
    )


def unpack(variables: Sequence[ClosureVariable], packed: np.ndarray) -> None:
    """Sets the chief's closure variables from one float64 vector."""
    first = 0
    for variable in variables:
        size = variable.shape.num_elements()
        value = packed[first : first + size].reshape(variable.shape.as_list())
        variable._chief_variable.assign(value.astype(variable.dtype.as_numpy_dtype))
        first += size


# Workers' copies of variables: those in use, and writes that make them old.
#
# Inside a context of `handles` a variable's handle is that of the worker's copy: reads, the tape
# and optimizers' updates use the copy, and nothing is sent to the server. Copies that overlapping
# steps read are as old as the last step: they do not include values that a callback, a checkpoint
# or the script assigns between steps.


# Dict from ids of variables to handles, of a step that a worker takes alone.
handles: ThreadValue[Mapping[int, tf.Tensor]] = ThreadValue()
# Raised by a thread while an optimizer is given the sums of a global step.
applying_sums_flag = ThreadFlag()


def handle_of(variable: tf.Variable) -> tf.Tensor | None:
    """The handle of the worker's copy of a variable, or None."""
    return (handles() or {}).get(id(variable))


class ChiefWrites:
    """Counts writes of this process.

    Attributes:
        count: Grows with each that is made eagerly, and with each update.
        are_traced: Whether a function of the script writes, which may be called at any time.
    """

    def __init__(self) -> None:
        self.count, self.are_traced = 0, False

    def note(self) -> None:
        """Notes that a variable is assigned to, eagerly or in a traced function."""
        if applying_sums_flag:
            return
        if tf.executing_eagerly():
            self.count += 1
        else:
            self.are_traced = True


writes = ChiefWrites()
