"""`ParameterServerStrategy`'s implementation half: where variables live and how they change."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from keras_psplus.core.base.threads import ThreadValue
from keras_psplus.parameter_server import placement, state
from keras_psplus.parameter_server.placement import Placement, Shard
from keras_psplus.parameter_server.state import WorkerStates
from keras_psplus.parameter_server.tracing.remote import CHIEF
from keras_psplus.parameter_server.tracing.worker_function import ClosureVariable, is_on_ps
from keras_psplus.parameter_server.transport.pulls import PulledVariable, updating_device
from keras_psplus.parameter_server.transport.pushes import Pushes
from keras_psplus.parameter_server.transport.sharded import ShardedVariable, current_shard
from keras_psplus.tf_internals import (
    distribute_lib,
    resource_variable_ops,
    sharded_variable,
    trackable_base,
)
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import parameter_server_strategy_v2 as stock

if TYPE_CHECKING:
    from keras_psplus.parameter_server.transport.pulls import Compressors

_Creator: TypeAlias = Callable[..., tf.Variable]
# The end of the path of an `Embedding`'s weights.
_TABLE = "/embeddings"


def gpus_per_worker(devices: Sequence[str], workers: Iterable[int]) -> int:
    """The number of GPUs that each worker has, 0 or 1.

    Args:
        devices: Full names of the cluster's GPUs.

    Raises:
        ValueError: If workers have unequal numbers of GPUs, or more than one.
    """
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
    """Additional APIs of `keras_psplus.ParameterServerStrategy`.

    Attributes:
        worker_states: State of compressors and `updates` on the workers.
    """

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
        # Steps reach the workers through our scheduler, not through the user's coordinator.
        self._allow_run_without_coordinator = True

    def _resource_creator_scope(self) -> Any:
        # TensorFlow's starts its coordinator, with threads of its own, for tables alone.
        if (strategy := self._container_strategy())._cluster_coordinator is not None:
            return super()._resource_creator_scope()
        return [state.creator_scope(strategy)]

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
        """Context for creating a Keras variable.

        Args:
            kind: What it is, if it lives on the chief and goes with the closures, as for
                `ClosureVariable`; else None.
        """
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
        shape, dtype = placement.form_of(kwargs, shape)
        if self._cuts_evenly and shape is None and callable(initial_value) and not is_of_checkpoint:
            # The script's own variable, whose shape nobody has said.
            with ops.device(CHIEF):
                kwargs["initial_value"] = initial_value()
            shape, dtype = placement.form_of(kwargs, None)
        if shape is None or shape.rank == 0:
            return None
        is_trained = kwargs.get("trainable") is not False
        if self._cuts_evenly:
            path, *_ = self._creating() or ("",)
            return self.placement.cut(shape, dtype, is_trained, path.endswith(_TABLE))
        if is_of_checkpoint or placement.size_of(shape, dtype) <= placement.LARGE_BYTES:
            return None
        # TensorFlow would send it whole.
        partitioner, count = self._variable_partitioner, 1
        if partitioner is not None:
            count = partitioner(shape=shape, dtype=tf.as_dtype(dtype))[0]
        offsets = placement.offsets_of(shape, dtype, count, keeps_whole=True)
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
        """Creates a variable, or a shard, on server `ps`, or on the least loaded."""
        # By bytes: a round robin puts every other kernel on one server and the biases between
        # them on another.
        is_trained = kwargs.get("trainable") is not False
        if ps is None:
            ps = self.placement.least_loaded(placement.size_if_known(kwargs), is_trained)
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
