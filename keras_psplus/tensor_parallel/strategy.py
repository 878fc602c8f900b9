"""`ModelParallelStrategy` for Keras 3 on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus import activation, catalogue
from keras_psplus import updates as updates_module
from keras_psplus.all_reduce import MultiWorkerMirroredStrategy, shard_option, startup
from keras_psplus.all_reduce.collectives.hop import DEFAULT_BUCKET_BYTES, Hop, Route
from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.all_reduce.topology import group_topology as topology_module
from keras_psplus.all_reduce.topology.group_topology import Topology
from keras_psplus.arguments import shown
from keras_psplus.cluster.process import memory
from keras_psplus.core.batch import batches
from keras_psplus.sharding.extended import ShardedExtended
from keras_psplus.tensor_parallel.engine import ModelParallelEngine
from keras_psplus.tensor_parallel.group import ModelGroup
from keras_psplus.tensor_parallel.mesh import DeviceMesh, Grid, LayoutMap, check_axes, grid_of
from keras_psplus.tensor_parallel.plan import AutomaticLayouts, Layouts

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.compression import Compressor
    from keras_psplus.updates import Updates


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
        in_row = launcher.like(first + row, rows[row])
        self._group = ModelGroup(in_row, place, len(rows[row]))
        first, column = first + len(rows), self.grid.column_of(rank)
        for i, (operations, one) in enumerate(
            ((self._cross_device_ops, launcher), (self._host_cross_device_ops, host))
        ):
            key = first + i * len(rows[0]) + place
            operations.narrow([one.like(key, column)])

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
    def places(self) -> list[int]:
        if not self.cuts_slots:
            return super().places
        return [self.sharing_workers.index(rank) for rank in range(self._num_workers)]

    @property
    def route(self) -> Route:
        if self.cuts_slots:
            return Route(Hop(self.launcher(0), range(len(self.grid.rows)), self.world.rank))
        return super().route

    def _make_store_route(self) -> Route:
        if not self.cuts_slots:
            return self.route
        workers = self.sharing_workers
        launcher = self._of_all.like(self.take_group_keys(1), workers)
        return Route(Hop(launcher, workers, workers.index(self._id_in_cluster)))

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


class ModelParallelStrategy(MultiWorkerMirroredStrategy):
    """Tensor parallelism, alone or with data parallelism, for `model.fit` of Keras 3.

    Every worker runs the same script. Weights are cut along axes that a layout map names; workers
    of a row of the mesh compute each layer together on the same rows of a batch, and rows of the
    mesh divide batches as `MultiWorkerMirroredStrategy` does. Weights and metrics equal those of
    one process. Without a cluster the process trains alone, with whole weights.

    Args:
        cluster_resolver: As in `MultiWorkerMirroredStrategy`.
        communication_options: As there.
        layout_map: `keras_psplus.LayoutMap`, or `keras.distribution.LayoutMap` of KerasHub, from
            patterns of variables' paths to the mesh axis of each dimension; or a dict. With
            `"auto"`, attention is cut by heads, embeddings by vocabulary, and other kernels by
            columns, where sizes are multiples of the axis.
        mesh: `keras_psplus.DeviceMesh` of the workers; None for that of the layout map, or for one
            row of all workers.
        batch_dim_name: Name of the mesh axis along which batches are divided; None for the first
            of two axes. The single axis of a mesh is the model's, unless it is named here.
        startup_timeout: As in `MultiWorkerMirroredStrategy`.
        heartbeat_timeout: As there.
        stall_warning: As there.
        bucket_bytes: As there, for gradients summed along the axis of batches.
        compression: As there, of these gradients.
        updates: `keras_psplus.updates.Accumulate(steps)`, or a text such as `"accumulate:4"`, to
            sum and apply gradients once in so many steps; None for every step.
        topology: As there, for these gradients: groups of whole rows of the mesh.
        shard: `"optimizer"` to cut an optimizer's slots along the axis of batches, too: a worker
            keeps and updates a piece of what the workers of its column have alike; `"all"` to cut
            weights as well.
        reshard_after_forward: As in `MultiWorkerMirroredStrategy`, of `shard="all"`.

    Raises:
        ValueError: If an argument is out of range, or mesh, layouts and cluster do not fit.
        keras_psplus.cluster.ClusterConfigError: If `TF_CONFIG` is wrong.
        keras_psplus.cluster.ClusterStartupError: If a worker does not come up in time.
        RuntimeError: If TensorFlow was initialised before the strategy was made.

    Example:

    ```python
    mesh = keras_psplus.DeviceMesh((2, 2), ("batch", "model"))
    layouts = keras_psplus.LayoutMap(mesh)
    layouts[".*dense/kernel"] = (None, "model")
    strategy = keras_psplus.ModelParallelStrategy(layout_map=layouts)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(64, name="dense"), keras.layers.Dense(10)])
        model.compile(optimizer="sgd", loss="mse")
    model.fit(x, y, batch_size=64, epochs=3)
    ```

    Reference: https://keras.io/api/distribution/model_parallel/
    """

    _engine_class = ModelParallelEngine
    _rows_are_shared = True

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        layout_map: keras.distribution.LayoutMap | dict[str, Any] | str = "auto",
        mesh: keras.distribution.DeviceMesh | None = None,
        batch_dim_name: str | None = None,
        startup_timeout: float = 300.0,
        heartbeat_timeout: float = 20.0,
        stall_warning: float | None = 60.0,
        bucket_bytes: float = DEFAULT_BUCKET_BYTES,
        compression: str | Compressor | dict[str, Any] | None = None,
        updates: str | Updates | None = None,
        topology: str | Sequence[Sequence[str | int]] | None = None,
        shard: str | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        activation.activate()
        compression, updates = catalogue.fill(
            type(self).__name__, compression=compression, updates=updates
        )
        updates = updates_module.get(updates)
        if updates is not None and updates.local:
            raise ValueError(
                "Of `updates`, `Accumulate` alone can be combined with ModelParallelStrategy: a "
                "weight lies in parts on the workers of a row, which `LocalSGD` and `DiLoCo` would "
                f"average whole. Received: updates={updates!r}"
            )
        workers = startup.workers_of(startup.task_of(cluster_resolver))
        is_automatic = isinstance(layout_map, str) and layout_map == "auto"
        if is_automatic:
            layout_map, mesh = {}, mesh or DeviceMesh((1, len(workers or [""])), ("batch", "model"))
        layout_map = _layouts_of(layout_map, mesh)
        # Without a cluster, the process stands for what there is.
        self.grid = workers and grid_of(layout_map.device_mesh, batch_dim_name, workers)
        make_layouts = AutomaticLayouts if is_automatic else Layouts
        self.layouts = self.grid and make_layouts(layout_map, self.grid)
        shard_option.check(shard, updates, self._engine_class)
        shard_option.check_reshard(shard, reshard_after_forward)
        if shard is not None and topology is not None:
            raise ValueError(
                "ModelParallelStrategy takes either `shard` or `topology`: pieces of slots go in "
                f"one hop. Leave one of them out. Received: shard={shard!r}, topology={topology!r}"
            )
        # Workers of a single row share slots with no others.
        self.shard = shard if self.grid and len(self.grid.rows) > 1 else None
        # Nor do they send weights, whose compressor may be there beside that of gradients.
        of_gradients, _ = shard_option.compressors(compression, shard)
        if self.grid:
            _check_topology(topology_module.get(topology, workers), self.grid)
        if workers is not None and len(workers) > 1:
            self._extended_class = ModelParallelExtended
            # As with `shard=`, freed memory would stay in the process.
            memory.keep_little_freed_memory()
        with catalogue.settled():
            super().__init__(
                cluster_resolver,
                communication_options,
                startup_timeout=startup_timeout,
                heartbeat_timeout=heartbeat_timeout,
                stall_warning=stall_warning,
                bucket_bytes=bucket_bytes,
                compression=compression if self.shard else of_gradients,
                updates=updates,
                topology=topology,
                shard=self.shard,
                reshard_after_forward=reshard_after_forward or self.shard is None,
            )
        devices = len(self.extended.worker_devices)
        if self._is_active and devices > 1:
            raise ValueError(
                "ModelParallelStrategy needs workers with one device each: start a worker for each "
                "GPU (CUDA_VISIBLE_DEVICES), as `keras-psplus run` can. "
                f"Received: {devices} devices"
            )
        self._options = {
            "mesh": tuple(layout_map.device_mesh.shape),
            "axes": tuple(layout_map.device_mesh.axis_names),
            "compression": compression,
            "updates": updates,
            "topology": topology,
            "shard": shard,
        }

    @property
    def _distributes(self) -> bool:
        return self.num_workers > 1

    @property
    def _is_active(self) -> bool:
        return self.num_workers > 1


def _check_topology(topology: topology_module.Topology | str, grid: Grid) -> None:
    if topology == topology_module.AUTO:
        raise ValueError(
            "ModelParallelStrategy does not measure links: give `topology` groups of whole rows of "
            f"the mesh, or leave it out. Received: topology={topology!r}"
        )
    if isinstance(topology, topology_module.Topology):
        grid.groups_of_rows(topology)


def _layouts_of(layout_map: Any, mesh: Any) -> keras.distribution.LayoutMap:
    """The layout map, whose mesh is known and has all of its axes."""
    if mesh is not None and not isinstance(mesh, keras.distribution.DeviceMesh):
        raise ValueError(
            f"`mesh` must be a `keras_psplus.DeviceMesh`. Received: mesh={shown(mesh)}"
        )
    if isinstance(layout_map, dict) and mesh is not None:
        layouts = LayoutMap(mesh)
        for key, layout in layout_map.items():
            layouts[key] = layout
        return layouts
    if not isinstance(layout_map, keras.distribution.LayoutMap) or layout_map.device_mesh is None:
        raise ValueError(
            '`layout_map` must be "auto", a `keras_psplus.LayoutMap`, or a dict beside `mesh`. '
            f"Received: layout_map={shown(layout_map)}, mesh={shown(mesh)}"
        )
    if mesh not in (None, layout_map.device_mesh):
        raise ValueError(
            "`mesh` must be that of `layout_map`: leave it out. "
            f"Received: mesh={mesh}, layout_map of {layout_map.device_mesh}"
        )
    for key, layout in layout_map.items():
        check_axes(layout.axes, layout_map.device_mesh, key)
    return layout_map
