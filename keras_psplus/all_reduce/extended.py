"""`MultiWorkerMirroredStrategy`'s implementation half: devices, variables, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce import reducers
from keras_psplus.all_reduce.collectives import implementation
from keras_psplus.all_reduce.collectives.hop import sum_packed
from keras_psplus.all_reduce.collectives.operations import (
    CollectiveOps,
    Launcher,
    gather_rows,
    names_of,
)
from keras_psplus.all_reduce.reduction.replica_states import MirroredState
from keras_psplus.all_reduce.step import mirrored_variables, updating
from keras_psplus.all_reduce.topology import group_topology
from keras_psplus.all_reduce.topology.group_topology import Hops, Levels, Topology
from keras_psplus.core.base.threads import ThreadFlag, ThreadValue
from keras_psplus.core.batch import batches
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.core.jobs import failure
from keras_psplus.tf_internals import (
    collective_all_reduce_strategy,
    context,
    device_util,
    distribute_lib,
    distributed_values,
)
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    from tensorflow.distribute.cluster_resolver import ClusterResolver

    from keras_psplus.core.jobs.control import ControlPlane
    from keras_psplus.updates import Updates

# TensorFlow counts the keys of its own groups up from 1.
_GROUP_KEYS = 1 << 20
_SUM = tf.distribute.ReduceOp.SUM


class MultiWorkerMirroredExtended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """Additional APIs of `keras_psplus.MultiWorkerMirroredStrategy`.

    Attributes:
        control: The control plane between workers, or None if there is one worker.
        levels: The hops of a topology for each local replica; None for one ring.
        updating: Scheduler of optimizer steps; None if they are made at every step.
        worker_state: State that replicas keep from step to step.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        cluster_resolver: ClusterResolver,
        communication_options: tf.distribute.experimental.CommunicationOptions,
        control: ControlPlane | None,
        hops: Hops,
        bucket_bytes: int,
        policy: Updates | None,
        topology: Topology | str,
    ) -> None:
        self.control = control
        self.updating = None if policy is None else updating.MirroredUpdates(policy, strategy)
        self._step_variables: dict[tuple[str, str], tf.Variable] = {}
        self._creating: ThreadValue[tuple[str, bool]] = ThreadValue()
        self._zeros = ThreadFlag()
        super().__init__(
            strategy, cluster_resolver=cluster_resolver, communication_options=communication_options
        )
        between_replicas = implementation.choose(
            communication_options, list(self.worker_devices), control
        )
        for name, options in (
            ("_cross_device_ops", between_replicas),
            ("_host_cross_device_ops", communication_options),
        ):
            operations = CollectiveOps.like(getattr(self, name), options)
            setattr(self, name, operations)
            if control is not None:
                local = len(operations.launchers)
                for launcher in operations.launchers:
                    launcher.members = names_of(control.task, local)
        self.worker_state = MirroredState(
            self.worker_devices,
            self.world,
            control,
            f"worker-{self._id_in_cluster}-of-{self._num_workers}",
            lambda: self._keeps_state,
            lambda *args: self.updating.momenta(*args) if self.updating else {},
        )
        # A replica that trains alone has nobody to send to.
        self._hops = hops if self._num_replicas_in_sync > 1 else Hops(None, None)
        self.bucket_bytes, self._next_group_key = bucket_bytes, _GROUP_KEYS
        self.set_topology(topology)

    def set_topology(self, topology: Topology | str) -> None:
        """Sets the topology along which gradients are summed, before the first step."""
        if self.control is not None:
            self.control.check_same("topology", str(topology), f"topology {topology}")
        self.levels = self._levels_of(topology)
        self.reducers = reducers.GradientReducer(
            self._cross_device_ops.launchers,
            self.world.rank,
            self._num_replicas_in_sync,
            self._hops if self.levels else self._hops.collapse_to_ring(topology),
            self.bucket_bytes,
            self.levels,
            self.worker_state,
        )

    def take_group_keys(self, number: int) -> int:
        """Reserves `number` consecutive group keys; returns the first.

        They are the same on all workers.
        """
        first = self._next_group_key
        self._next_group_key += number
        return first

    def _keys_of_levels(self, number: int) -> int:
        """Reserves group keys of a topology's hops; returns the first."""
        return self.take_group_keys(number)

    def _levels_of(self, topology: Topology | str | None) -> list[Levels] | None:
        """The hops of each local replica; None for one ring."""
        if not isinstance(topology, Topology):
            return None
        topology = topology.of_replicas(len(self.worker_devices))
        if not topology.has_levels:
            return None
        launchers = self._cross_device_ops.launchers
        first = self._keys_of_levels(group_topology.keys_of(topology))
        return [
            group_topology.levels_of(launcher, rank, topology, first)
            for rank, launcher in enumerate(launchers, self.world.rank)
        ]

    @property
    def world(self) -> batches.World:
        local = len(self.worker_devices)
        return batches.World(self._id_in_cluster * local, local, self._num_replicas_in_sync)

    @property
    def fetches_to_devices(self) -> bool:
        """Whether batches are copied to GPUs before their steps."""
        return "GPU" in self.worker_devices[0]

    @property
    def barrier(self) -> Any:
        """Operation that every step waits for before all workers continue, or None."""
        return None

    @property
    def _keeps_state(self) -> bool:
        """Whether compressors or update rules may keep anything from step to step."""
        return self.reducers.compresses or self.updating is not None

    def rank_in_context(self) -> int:
        """Rank among all replicas of the one whose context this is, as a Python int."""
        return self.world.rank + distribute_lib.get_replica_context()._replica_id

    def device_in_context(self) -> str:
        return self.worker_devices[distribute_lib.get_replica_context()._replica_id]

    def launcher(self, local_replica: int | None = None) -> Launcher:
        """Collectives of a local replica; by default the one whose context this is."""
        if local_replica is None:
            local_replica = distribute_lib.get_replica_context()._replica_id
        return self._cross_device_ops.launchers[local_replica]

    @property
    def host_launcher(self) -> Launcher:
        """Collectives between the hosts of all workers."""
        return self._host_cross_device_ops.launchers[0]

    def sum_over_replicas(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Sums small tensors over all replicas, in replica context."""
        tensors = list(tensors)
        if not tensors:
            return []
        if tf.executing_eagerly() and current_step() is not None:
            # Eager replicas run one after the other: only a merge_call lets all of them take part.
            return list(distribute_lib.get_replica_context().all_reduce(_SUM, tensors))
        return sum_packed(self.launcher(), tensors)

    def max_over_replicas(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Largest values of small tensors over all replicas, in replica context."""
        # Each in its own row of a sum, as there are no sums of another kind.
        rows = tf.one_hot(self.rank_in_context(), self._num_replicas_in_sync)
        parts = [
            tf.tensordot(tf.cast(rows, t.dtype), t, axes=0)
            for t in map(tf.convert_to_tensor, tensors)
        ]
        return [tf.reduce_max(total, 0) for total in self.sum_over_replicas(parts)]

    def sum_over_group(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Sums small tensors over the replicas of a topology's group, in replica context."""
        assert self.levels is not None
        return group_topology.sum_over_group(self.levels, list(tensors))

    def gather_rows(self, value: Any) -> Any:
        """Concatenates the replicas' rows in rank order, in graph mode; see `outputs.py`."""
        local = self._container_strategy().experimental_local_results(value)
        # Every local replica takes part; all of them get the same.
        first = self.world.rank
        return [gather_rows(self.launcher(i), first + i, t) for i, t in enumerate(local)][0]

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        """Gives all workers the first one's values of variables that all of them have."""
        mirrored_variables.sum_from_chief(
            self.host_launcher, self._is_chief, variables, self.bucket_bytes
        )

    def step_variable(self, name: str, on_host: bool = False) -> tf.Variable:
        """A float of this replica's step by name; `on_host`, the host reads it without waiting."""
        device = self.device_in_context()
        variable = self._step_variables.get((device, name))
        if variable is None:
            variable = made_outside(lambda: 1.0, "CPU:0" if on_host else device)
            self._step_variables[device, name] = variable
        return variable

    def has_made(self, variable: Any) -> bool:
        return isinstance(variable, distributed_values.DistributedVariable)

    def creating(self, name: str, accumulates: bool) -> AbstractContextManager[Any]:
        """Context for creating a variable of a known name.

        Args:
            accumulates: Whether replicas add to it what a `MirroredReplicaStep` then makes a
                global total.
        """
        return self._creating.being((name, accumulates))

    def creating_zeros(self) -> AbstractContextManager[Any]:
        """Context for creating variables of zeros: workers need not send each other the values."""
        return self._zeros.raised()

    def _use_merge_call(self) -> bool:
        # Updates run in replica context, so that they may stand inside tf.cond and tf.while_loop.
        return False

    def _initialize_local_devices(
        self, cluster_resolver: ClusterResolver, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        # Not as many GPUs as the resolver knows of: most say that there are none.
        kind, count = "GPU", context.context().num_gpus()
        if not count:
            # Several logical CPU devices are several replicas, as several GPUs are.
            kind, count = "CPU", len(self._own_cpus(worker_device))
        return tuple(f"{worker_device}/device:{kind}:{i}" for i in range(max(1, count))), kind

    def _own_cpus(self, worker_device: str) -> list[tf.config.LogicalDevice]:
        cpus = [
            tf.DeviceSpec.from_string(d.name) for d in context.context().list_logical_devices("CPU")
        ]
        if not worker_device:
            return cpus
        here = tf.DeviceSpec.from_string(device_util.canonicalize(worker_device + "/device:CPU:0"))
        return [cpu for cpu in cpus if (cpu.job, cpu.task) == (here.job, here.task)]

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        of_keras = self._creating()
        _, accumulates = of_keras or ("", False)
        averaged = of_keras and kwargs.get("aggregation") == tf.VariableAggregation.MEAN
        if accumulates or averaged:
            # The step makes totals and means global, once; TensorFlow would at each assignment.
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        elif kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            # Its assign needs merge_call; every replica assigns the same value anyway.
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        variable = super()._create_variable(next_creator, **kwargs)
        mirrored_variables.enable_row_reads(variable)
        return variable

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        stock = super()._get_variable_creator_initial_value
        if replica_id != 0 or self._num_workers == 1:
            return stock(replica_id, device, primary_var, **kwargs)
        unnamed = kwargs.get("name") or "variable", False
        path, _ = self._creating() or unnamed
        are_zeros = bool(self._zeros)

        control = self.control
        assert control is not None

        def initial_value() -> tf.Tensor:
            with ops.device(device):
                value = kwargs["initial_value"]
                value = value() if callable(value) else value
                value = getattr(value, "wrapped_value", value)
                value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            form = f"shape={tuple(value.shape.as_list())}, dtype={value.dtype.name}"
            dtype = value.dtype
            with failure.translate_errors(control.task):
                control.check_same("variable", form, f"{path} ({form})")
                if are_zeros:
                    return value
                value = tf.cast(value, mirrored_variables.WIDER.get(dtype, dtype))
                sent = dict(kwargs, initial_value=value, dtype=value.dtype)
                return tf.cast(stock(replica_id, device, primary_var, **sent)(), dtype)

        return initial_value
