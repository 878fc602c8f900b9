"""Implementation half of `ModelParallelStrategy`: a row of the mesh is one replica of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.all_reduce.topology.group_topology import Topology
from keras_psplus.all_reduce.topology.levels import launcher_like
from keras_psplus.all_reduce.topology.shards import Route
from keras_psplus.core.batch import batches
from keras_psplus.sharding.extended import ShardedExtended
from keras_psplus.tensor_parallel.group import ModelGroup

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.tensor_parallel.mesh import Grid


class ModelParallelExtended(ShardedExtended):
    """Additional APIs of `ModelParallelStrategy`."""

    _group: ModelGroup | None = None

    def __init__(self, strategy: tf.distribute.Strategy, *args: Any, **options: Any) -> None:
        self.grid: Grid = strategy.grid
        # Whether an optimizer's slots are cut along columns, too.
        self.cuts_slots: bool = strategy.shard is not None
        super().__init__(strategy, *args, **options)

    def set_topology(self, topology: Topology | str) -> None:
        if self._group is None:
            self._divide()
        if isinstance(topology, Topology):
            topology = self.grid.groups_of_rows(topology)
        # Rows are the replicas; parts of weights stay inside of a row.
        MultiWorkerMirroredExtended.set_topology(self, topology)

    def _keys_of_levels(self, number: int) -> int:
        # Each column has its own hops.
        _, place = self.grid.place_of(self._id_in_cluster)
        return self.take_group_keys(number * len(self.grid.rows[0])) + number * place

    def _divide(self) -> None:
        """Makes the collectives of this worker's row and column."""
        rank, rows = self._id_in_cluster, self.grid.rows
        row, place = self.grid.place_of(rank)
        launcher, host = (
            one.launchers[0] for one in (self._cross_device_ops, self._host_cross_device_ops)
        )
        self._of_all, self._of_all_hosts = launcher, host
        first = self.take_group_keys(len(rows) + 2 * len(rows[0]))
        in_row = launcher_like(launcher, first + row, rows[row])
        self._group = ModelGroup(in_row, place, len(rows[row]))
        first, column = first + len(rows), self.grid.column_of(rank)
        for i, (operations, one) in enumerate(
            ((self._cross_device_ops, launcher), (self._host_cross_device_ops, host))
        ):
            key = first + i * len(rows[0]) + place
            operations.narrow([launcher_like(one, key, column)])

    @property
    def group(self) -> ModelGroup:
        """The workers that share weights with this one."""
        assert self._group is not None
        return self._group

    @property
    def world(self) -> batches.World:
        row, _ = self.grid.place_of(self._id_in_cluster)
        return batches.World(row, 1, len(self.grid.rows))

    @property
    def host_launcher(self) -> Launcher:
        launcher: Launcher = self._of_all_hosts
        return launcher

    @property
    def sharing_workers(self) -> Sequence[int]:
        if self.cuts_slots:
            return [rank for column in zip(*self.grid.rows) for rank in column]
        return self.grid.rows[self.world.rank]

    @property
    def route(self) -> Route:
        if self.cuts_slots:
            return Route(self.launcher(0), self.world.rank, len(self.grid.rows))
        return super().route

    @property
    def store_route(self) -> Route:
        if not self.cuts_slots:
            return self.route
        workers = self.sharing_workers
        launcher = launcher_like(self._of_all, self.take_group_keys(1), workers)
        return Route(launcher, workers.index(self._id_in_cluster), len(workers))

    @property
    def sharing_launcher(self) -> Launcher:
        return self.group.launcher

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self.grid.rows)

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.world.rank

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0

    def _make_input_context(self) -> tf.distribute.InputContext:
        world = self.world
        return tf.distribute.InputContext(
            num_input_pipelines=world.replicas,
            input_pipeline_id=world.rank,
            num_replicas_in_sync=world.replicas,
        )
