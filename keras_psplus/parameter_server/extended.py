"""`ParameterServerStrategy`'s implementation half: where variables live and how they change."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.arguments import shown
from keras_psplus.core.base.optimizers import unwrapped
from keras_psplus.core.base.threads import ThreadValue
from keras_psplus.core.graph.metrics import accumulates
from keras_psplus.log import warn_once
from keras_psplus.parameter_server.aggregation import Pushes
from keras_psplus.parameter_server.pulls import (
    PulledVariable,
    ShardedVariable,
    current_shard,
    parts_of,
    updating_device,
)
from keras_psplus.parameter_server.state import WorkerStates, creator_scope
from keras_psplus.parameter_server.worker_function import CHIEF, ClosureVariable, is_on_ps
from keras_psplus.tf_internals import (
    distribute_lib,
    resource_variable_ops,
    sharded_variable,
    trackable_base,
)
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import parameter_server_strategy_v2 as stock

if TYPE_CHECKING:
    from keras_psplus.parameter_server.pulls import Compressors


# Numbers of shards of variables too large to be sent in one tensor.
#
# TensorFlow sends no tensor of 2 GiB between tasks. A larger shard could be trained by rows, but
# neither be read as a whole nor saved.


Shape: TypeAlias = tf.TensorShape | Sequence[int]
DType: TypeAlias = tf.DType | str
# Above this, a variable is made here and not by TensorFlow, which would send it whole.
LARGE_BYTES = 1 << 30
# Of what a task can send at once, with room for what goes with it.
MOST_BYTES = (1 << 31) - (1 << 20)


def size_of(shape: Shape, dtype: DType) -> int:
    return tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size


def offsets_of(shape: Shape, dtype: DType, shards: int, keeps_whole: bool) -> list[int]:
    """First rows of a large variable's shards, and the number of all rows."""
    return offsets_of_rows(shape[0], row_bytes_of(shape, dtype), shards, keeps_whole)


def row_bytes_of(shape: Shape, dtype: DType) -> int:
    """Bytes of a variable's row; raises ValueError if that is too large to be sent."""
    row_bytes = size_of(shape[1:], dtype)
    if row_bytes > MOST_BYTES:
        raise ValueError(
            "A variable on parameter servers is cut along its first axis into parts of less than "
            "2 GiB. Give it another shape, or make it smaller. "
            f"Received: shape={tuple(shape)}, dtype={tf.as_dtype(dtype).name}"
        )
    return row_bytes


def offsets_of_rows(rows: int, row_bytes: int, shards: int, keeps_whole: bool) -> list[int]:
    shards = min(shards, rows)
    most = MOST_BYTES if keeps_whole else LARGE_BYTES
    if -(-rows // shards) * row_bytes > most:
        shards = max(shards, -(-rows // max(1, LARGE_BYTES // row_bytes)))
    base, extra = divmod(rows, shards)
    return [i * base + min(i, extra) for i in range(shards + 1)]


def form_of(
    kwargs: Mapping[str, Any], shape: Shape | None
) -> tuple[tf.TensorShape | None, DType | None]:
    value, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
    if isinstance(value, (tf.Tensor, np.ndarray)):
        shape, dtype = value.shape, dtype or value.dtype
    elif shape is None:
        shape = kwargs.get("shape")
    if shape is None or dtype is None or not tf.TensorShape(shape).is_fully_defined():
        return None, None
    return tf.TensorShape(shape), dtype


# Placement of variables and shards on parameter servers.
#
# Variables are created one after the other, and later ones are unknown. So a large variable is cut
# over all servers, which leaves their balance unchanged, and a variable that is too small for that
# is placed on the least loaded server. In that way servers are balanced whatever the order, and a
# step's reads and gradients use all their links from the first byte to the last.


# Below this a message costs more than its bytes.
LEAST_SHARD_BYTES = 32 << 10
# Above this, cutting further wins nothing.
MOST_LEAST_SHARD_BYTES = 1 << 20
# Of shards that are sent, updated and read one after the other: each has an update of its own.
FINE_SHARD_BYTES, _MOST_FINE_SHARDS = 1 << 20, 8
# Of a server's bytes: what is not cut has less than two of these, a tenth.
_LEAST_PART = 0.05


class Shard(NamedTuple):
    ps: int | None
    first: int
    end: int


class Placement:
    """Bytes of each parameter server, and the choice of the next server.

    `weights`, whose sum is made 1, are the servers' parts of the bytes. With `cuts_finely`, a
    server may have several shards of a large variable, each sent, updated and read by itself.
    """

    def __init__(self, weights: Sequence[float], cuts_finely: bool = False) -> None:
        self._cuts_finely = cuts_finely
        self.weights = [weight / sum(weights) for weight in weights]
        # Trained variables have an optimizer's slots beside them: each kind is balanced alone.
        self._bytes = {is_trained: [0] * len(weights) for is_trained in (True, False)}

    @property
    def bytes_on_ps(self) -> list[int]:
        return [sum(both) for both in zip(*self._bytes.values())]

    def least_loaded(self, size: int, is_trained: bool) -> int:
        have, all_have = self._bytes[is_trained], self.bytes_on_ps
        return min(
            range(len(have)),
            key=lambda ps: ((have[ps] + size) / self.weights[ps], all_have[ps] / self.weights[ps]),
        )

    def add(self, ps: int, size: int, is_trained: bool) -> None:
        self._bytes[is_trained][ps] += size

    def cut(
        self, shape: Shape, dtype: DType, is_trained: bool, is_table: bool = False
    ) -> list[Shard]:
        """Cuts a variable by rows so that all servers' bytes stay balanced.

        A table, of which steps look up rows, is not cut finely: each shard is asked by itself, and
        not much is sent.
        """
        rows = shape[0]
        row_bytes = row_bytes_of(shape, dtype)
        size = rows * row_bytes
        if not size:
            return [Shard(self.least_loaded(0, is_trained), 0, rows)]
        wanted = self._wanted(size, is_trained)
        total = sum(self._bytes[is_trained]) + size
        least = _LEAST_PART * total / len(wanted)
        least = min(max(least, LEAST_SHARD_BYTES), MOST_LEAST_SHARD_BYTES)
        while len(wanted) > 1:
            scale = size / sum(wanted.values())
            smallest = min(wanted, key=lambda ps: wanted[ps])
            enough_rows = len(wanted) <= rows
            if enough_rows and wanted[smallest] * scale >= least:
                break
            del wanted[smallest]
        if len(wanted) == 1:
            wanted = {self.least_loaded(size, is_trained): 1.0}
        most = LARGE_BYTES
        if self._cuts_finely and not is_table:
            most = max(FINE_SHARD_BYTES, size // (_MOST_FINE_SHARDS * len(wanted)))
        return _shards(_whole_rows(wanted, rows), row_bytes, most)

    def _wanted(self, size: int, is_trained: bool) -> dict[int, float]:
        """By server, how many of a variable's bytes would make up its part."""
        have = self._bytes[is_trained]
        total = sum(have) + size
        wanted = {ps: weight * total - have[ps] for ps, weight in enumerate(self.weights)}
        return {ps: missing for ps, missing in wanted.items() if missing > 0}


def _whole_rows(wanted: Mapping[int, float], rows: int) -> dict[int, int]:
    """Rows of each server, as near to what is wanted as whole ones can be."""
    scale = rows / sum(wanted.values())
    counts = {ps: int(part * scale) for ps, part in wanted.items()}
    by_rest = sorted(wanted, key=lambda ps: counts[ps] - wanted[ps] * scale)
    for ps in by_rest[: rows - sum(counts.values())]:
        counts[ps] += 1
    return {ps: count for ps, count in sorted(counts.items()) if count}


def _shards(counts: Mapping[int, int], row_bytes: int, most: int) -> list[Shard]:
    shards, first = [], 0
    for ps, rows in counts.items():
        count = -(-rows * row_bytes // most)
        offsets = offsets_of_rows(rows, row_bytes, count, keeps_whole=False)
        shards += [Shard(ps, first + a, first + b) for a, b in zip(offsets, offsets[1:])]
        first += rows
    return shards


def weights_of(addresses: Sequence[str]) -> list[float]:
    """Weights of the servers: hosts have equal ones, whose servers share a link."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    servers = collections.Counter(hosts)
    return [1.0 / servers[host] for host in hosts]


def check_partitioner(given: object) -> None:
    is_auto = isinstance(given, str) and given == "auto"
    if given is not None and not is_auto and not callable(given):
        raise ValueError(
            '`variable_partitioner` must be "auto", None, or one of '
            "`tf.distribute.experimental.partitioners`. "
            f"Received: variable_partitioner={shown(given)}"
        )


# Kinds of variables, and a table of those on each parameter server.


_NEED_WHOLE_TENSORS = ("Lamb", "Muon")
# Elements. A closure variable crosses the chief's network with every share of a step.
_LARGEST_STATE = 1 << 16


def kind_of(variable: keras.Variable, shape: Sequence[int] | None, is_sync: bool) -> str | None:
    """Kind of a closure variable that has, or will have, a shape; None of others."""
    if variable._name == "seed_generator_state":
        return "seed"
    if accumulates(variable):
        return "total"
    return "state" if is_sync and _is_state(variable, shape or ()) else None


def _is_state(variable: keras.Variable, shape: Sequence[int]) -> bool:
    """Whether a variable is a layer's own, which steps change otherwise than by gradients."""
    dtype = tf.as_dtype(variable.dtype)
    return (
        variable._is_of_layer
        and not variable.trainable
        and (dtype.is_floating or dtype.is_integer)
        and math.prod(shape) <= _LARGEST_STATE
    )


def bytes_on_ps(variables: Iterable[keras.Variable], num_ps: int) -> list[int]:
    sizes = [0] * num_ps
    for part in itertools.chain.from_iterable(_parts(variable) for variable in variables):
        ps = tf.DeviceSpec.from_string(part.device).task
        sizes[ps] += size_of(part.shape, part.dtype)
    return sizes


def report(addresses: Sequence[str], weights: Sequence[float], model: keras.Model) -> str:
    optimizer = getattr(model, "optimizer", None)
    slots = list(optimizer.variables) if optimizer is not None else []
    own = {id(variable) for variable in slots}
    variables = [variable for variable in model.variables if id(variable) not in own]
    of_model, of_optimizer = (bytes_on_ps(these, len(addresses)) for these in (variables, slots))
    both = [sum(pair) for pair in zip(of_model, of_optimizer)]
    total = max(sum(both), 1)
    rows = [("ps", "address", "variables MB", "optimizer MB", "part", "of its due")]
    for ps, weight in enumerate(weights):
        rows.append(
            (
                f"ps-{ps}",
                addresses[ps],
                f"{of_model[ps] / 1e6:.2f}",
                f"{of_optimizer[ps] / 1e6:.2f}",
                f"{both[ps] / total:.1%}",
                f"{both[ps] / total / weight:.2f}",
            )
        )
    on_ps = [variable for variable in variables if _parts(variable)]
    cut = sum(isinstance(variable._value, ShardedVariable) for variable in on_ps)
    return (
        f"'{model.name}' on {len(addresses)} parameter servers: {len(on_ps)} variables, {cut} of "
        f"them cut, {total / 1e6:.1f} MB with the optimizer's\n{text_table.aligned(rows)}"
    )


def warn_of_whole_tensors(model: keras.Model) -> None:
    name = type(unwrapped(getattr(model, "optimizer", None))).__name__
    is_cut = any(isinstance(v._value, ShardedVariable) for v in model.trainable_variables)
    if name in _NEED_WHOLE_TENSORS and is_cut:
        warn_once(
            "%s looks at a whole tensor at once, and sees each shard of a variable that is cut "
            "alone: pass `variable_partitioner=None` to the strategy to keep variables whole",
            name,
        )


def _parts(variable: keras.Variable) -> list[tf.Variable]:
    """A variable's shards, or itself, if they lie on parameter servers."""
    return [part for part in parts_of(variable._value) if is_on_ps(part)]


_Creator: TypeAlias = Callable[..., tf.Variable]
# The end of the path of an `Embedding`'s weights.
_TABLE = "/embeddings"


def gpus_per_worker(devices: Sequence[str], workers: Iterable[int]) -> int:
    """The number of GPUs that each worker has, 0 or 1."""
    of_workers = [tf.DeviceSpec.from_string(name) for name in devices]
    counts: Any = collections.Counter(spec.task for spec in of_workers if spec.job == "worker")
    counts = {i: counts[i] for i in workers}
    most = max(counts.values())
    if most > 1 or min(counts.values()) != most:
        listed = ", ".join(f"worker-{i}: {n}" for i, n in counts.items())
        raise ValueError(
            "ParameterServerStrategy trains one replica on each worker, on a GPU in all of them "
            "or in none: set CUDA_VISIBLE_DEVICES of each worker to one GPU, or to nothing. "
            f"Received: GPUs of {listed}"
        )
    return most


class ParameterServerExtended(stock.ParameterServerStrategyV2Extended):
    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        variable_partitioner: tf.distribute.experimental.partitioners.Partitioner | str | None,
        compressors: Compressors,
        weights: Sequence[float],
        cuts_finely: bool = False,
    ) -> None:
        self._cuts_evenly = variable_partitioner == "auto"
        partitioner = None if self._cuts_evenly else variable_partitioner
        super().__init__(strategy, cluster_resolver, partitioner)
        self._creating: ThreadValue[tuple[str, str | None, Any]] = ThreadValue()
        self.placement = Placement(weights, cuts_finely)
        self.compressors = compressors
        self.worker_states = WorkerStates(self._num_workers)
        self.pushes = Pushes(compressors, self.worker_states)
        # Variables on the servers, by the ids of their handles.
        self.by_handle = weakref.WeakValueDictionary[int, tf.Variable]()
        # Steps reach the workers through our scheduler, not through the user's coordinator.
        self._allow_run_without_coordinator = True

    def _resource_creator_scope(self) -> Any:
        # TensorFlow's starts its coordinator, with threads of its own, for tables alone.
        if (strategy := self._container_strategy())._cluster_coordinator is not None:
            return super()._resource_creator_scope()
        return [creator_scope(strategy)]

    def _set_num_gpus(self) -> None:
        gpus, cpus = (
            [device.name for device in tf.config.list_logical_devices(kind)]
            for kind in ("GPU", "CPU")
        )
        found = [tf.DeviceSpec.from_string(name) for name in cpus]
        workers = sorted(spec.task for spec in found if spec.job == "worker")
        self._num_gpus_per_worker = gpus_per_worker(gpus, workers)

    def has_made(self, variable: tf.Variable) -> bool:
        return isinstance(variable, ClosureVariable) or is_on_ps(variable)

    def creating(
        self, name: str, kind: str | None, shape: tf.TensorShape | Sequence[int] | None = None
    ) -> AbstractContextManager[Any]:
        """Context for creating a Keras variable, of a `kind` if a `ClosureVariable`."""
        return self._creating.being((name, kind, shape))

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        # One replica needs no thread: merge_call then works inside tf.cond and tf.while_loop.
        with distribute_lib.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=0):
            return fn(*args, **(kwargs or {}))

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Iterable[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        return [value for value, _ in value_destination_pairs]

    def _create_var_creator(self, next_creator: _Creator, **kwargs: Any) -> _Creator:
        creating = self._creating()

        def creator(**kwargs: Any) -> tf.Variable:
            kwargs.pop("aggregation", None)
            kwargs.pop("synchronization", None)
            variable = next_creator(**kwargs)
            # Keras's own variables; the script's may be lifted out of a function that is traced.
            if creating and type(variable) is resource_variable_ops.ResourceVariable:
                variable.__class__ = PulledVariable
                variable.keras_path = creating[0]
            self.by_handle[id(getattr(variable, "_handle", None))] = variable
            return variable

        return creator

    def _create_variable(self, next_creator: _Creator, **kwargs: Any) -> Any:
        _, kind, shape = self._creating() or ("", None, None)
        if kind is not None:
            for name in ("aggregation", "synchronization", "colocate_with"):
                kwargs.pop(name, None)
            with ops.colocate_with(None, ignore_existing=True), ops.device(CHIEF):
                return ClosureVariable(next_creator(**kwargs), kind)
        whole = kwargs.get("colocate_with")
        if isinstance(whole, ShardedVariable):
            return self._create_colocated_with_shards(next_creator, whole, **kwargs)
        shards = self._shards(shape, kwargs)
        if shards is not None and len(shards) > 1:
            return self._create_in_shards(next_creator, shards, **kwargs)
        if kwargs.get("initial_value") is None and whole is None:
            # Of a SavedModel that is being loaded, whose functions read whole variables' handles.
            creator = self._create_var_creator(next_creator, **kwargs)
            return self._create_variable_round_robin(creator, **kwargs)
        variable = super()._create_variable(next_creator, **kwargs)
        if isinstance(variable, sharded_variable.ShardedVariable):
            return ShardedVariable(variable)
        return variable

    def _shards(self, shape: Any, kwargs: dict[str, Any]) -> list[Shard] | None:
        """Shards of a variable; None if TensorFlow creates it whole."""
        initial_value = kwargs.get("initial_value")
        if "colocate_with" in kwargs or initial_value is None:
            return None
        is_of_checkpoint = hasattr(initial_value, "checkpoint_position")
        shape, dtype = form_of(kwargs, shape)
        if self._cuts_evenly and shape is None and callable(initial_value) and not is_of_checkpoint:
            # The script's own variable, whose shape nobody has said.
            with ops.device(CHIEF):
                kwargs["initial_value"] = initial_value()
            shape, dtype = form_of(kwargs, None)
        if shape is None or shape.rank == 0:
            return None
        is_trained = kwargs.get("trainable") is not False
        if self._cuts_evenly:
            path, *_ = self._creating() or ("",)
            return self.placement.cut(shape, dtype, is_trained, path.endswith(_TABLE))
        if is_of_checkpoint or size_of(shape, dtype) <= LARGE_BYTES:
            return None
        # TensorFlow would send it whole.
        partitioner, count = self._variable_partitioner, 1
        if partitioner is not None:
            count = partitioner(shape=shape, dtype=tf.as_dtype(dtype))[0]
        offsets = offsets_of(shape, dtype, count, keeps_whole=True)
        return [Shard(None, first, end) for first, end in zip(offsets, offsets[1:])]

    def _create_in_shards(
        self, next_creator: _Creator, shards: Sequence[Shard], **kwargs: Any
    ) -> ShardedVariable:
        """Makes a variable whose first value is the chief's, who sends each shard by itself."""
        initial_value = kwargs.pop("initial_value")
        shape = kwargs.pop("shape", None)
        name = kwargs.pop("name", None) or "variable"
        creator = self._create_var_creator(next_creator, **kwargs)
        is_of_checkpoint = hasattr(initial_value, "checkpoint_position")
        if not is_of_checkpoint:
            with ops.device(CHIEF):
                value = initial_value() if callable(initial_value) else initial_value
                value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
        parts = []
        for i, (ps, first, end) in enumerate(shards):
            if is_of_checkpoint:
                rest = tuple(tf.TensorShape(shape)[1:])
                kwargs["shape"] = (end - first, *rest)
                own = functools.partial(
                    initial_value,
                    shard_info=trackable_base.ShardInfo(
                        shape=tf.TensorShape((end - first, *rest)),
                        offset=(first, *(0 for _ in rest)),
                    ),
                )
            else:
                with ops.device(CHIEF):
                    own = value[first:end]
            parts.append(
                self._create_on_ps(
                    creator, ps, **kwargs, initial_value=own, name=f"{name}/part_{i}"
                )
            )
        return ShardedVariable(sharded_variable.ShardedVariable(parts))

    def _create_colocated_with_shards(
        self, next_creator: _Creator, whole: ShardedVariable, **kwargs: Any
    ) -> ShardedVariable:
        """Makes an optimizer's slot in shards, each on the server of the variable's shard."""
        kwargs.pop("colocate_with")
        initial_value = kwargs.pop("initial_value")
        value = initial_value() if callable(initial_value) else initial_value
        value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
        name = kwargs.pop("name", None) or "slot"
        if value.shape[:1] != whole.shape[:1]:
            raise ValueError(
                f"The optimizer's variable '{name}' cannot be cut like the sharded variable that "
                "it belongs to. Pass `variable_partitioner=None` to the strategy to keep variables "
                f"whole, or take another optimizer. Received: shape={value.shape}, for {whole}"
            )
        kwargs.pop("shape", None)
        parts = [
            super(ParameterServerExtended, self)._create_variable(
                next_creator,
                **kwargs,
                initial_value=value[first : first + shard.shape[0]],
                name=f"{name}/part_{i}",
                colocate_with=shard,
            )
            for i, (shard, first) in enumerate(zip(whole.shards, whole.offsets))
        ]
        return ShardedVariable(sharded_variable.ShardedVariable(parts))

    def _create_variable_round_robin(self, next_creator: _Creator, **kwargs: Any) -> tf.Variable:
        return self._create_on_ps(next_creator, None, **kwargs)

    def _create_on_ps(self, next_creator: _Creator, ps: int | None, **kwargs: Any) -> tf.Variable:
        # By bytes: a round robin puts every other kernel on one server and the biases between
        # them on another.
        is_trained = kwargs.get("trainable") is not False
        if ps is None:
            shape, dtype = form_of(kwargs, None)
            size = 0 if shape is None or dtype is None else size_of(shape, dtype)
            ps = self.placement.least_loaded(size, is_trained)
        with ops.colocate_with(None, ignore_existing=True):
            with ops.device(f"/job:ps/task:{ps}/device:CPU:0"):
                variable = next_creator(**kwargs)
        size = variable.shape.num_elements() * variable.dtype.size
        self.placement.add(ps, size, is_trained)
        return variable

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass

    def _update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        group: bool,
    ) -> Any:
        if not isinstance(var, ShardedVariable):
            with updating_device.being(var.device):
                return super()._update(var, fn, args, kwargs, group)
        split = [var.split(arg) for arg in args]
        for i in range(len(var.shards)):
            # Every variable that the update touches shows its i-th shard meanwhile.
            with current_shard.being(i), updating_device.being(var.device):
                super()._update(var, fn, tuple(part[i] for part in split), kwargs, group)
        return None

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return value
