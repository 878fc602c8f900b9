"""Clusters in which tests run cases: their tasks, and the strategy that each task makes.

Imported by the tasks, of which the one of `plain` must not import the library.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

# Idle tasks ask each other for signs of life, and machines that run tests are busy.
_PATIENT = {"heartbeat_timeout": 120}
# Of copies of rows: the most updates for which one may be read.
STALENESS = 15


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tasks of a cluster, and how each of them makes its strategy.

    Attributes:
        make: Makes the strategy, or None for plain Keras. In tasks that serve, it does not return.
        workers: Number of workers; none is one process without a cluster.
        ps: Number of parameter servers.
        chief: Whether a chief runs the cases, rather than all workers.
        most_cases: After so many cases, the next one starts a new cluster: TensorFlow keeps the
            functions of all.
    """

    make: Callable[[], Any]
    workers: int = 0
    ps: int = 0
    chief: bool = False
    most_cases: int = 80

    @property
    def processes(self):
        """Number of processes."""
        return self.workers + self.ps + self.chief or 1

    @property
    def tasks(self):
        """Names of the tasks that run cases."""
        if self.chief or not self.workers:
            return ["chief-0"] if self.chief else ["process"]
        return [f"worker-{index}" for index in range(self.workers)]


def _plain():
    from tests import references

    references.build_first()


def _makes(name, devices=None, **options):
    """Makes a strategy of the library, in a process with a number of logical devices."""

    def make():
        import keras_psplus as psp
        from keras_psplus.cluster.in_process import logical_devices

        if devices:
            logical_devices(devices)
        return getattr(psp, name)(**options)

    return make


def _servers_in_process(workers, shards=None, **options):
    """Parameter servers and workers that are threads of one process, the chief."""

    def make():
        import tensorflow as tf

        import keras_psplus as psp
        from keras_psplus.cluster.in_process import InProcessCluster

        cluster = InProcessCluster(workers=workers, ps=2)
        cluster.start()
        if shards:
            cut = tf.distribute.experimental.partitioners.FixedShardsPartitioner(shards)
            options["variable_partitioner"] = cut
        return psp.ParameterServerStrategy(cluster.cluster_resolver, **options)

    return make


def _mesh(rows, columns, **options):
    """Tensor parallelism in rows of a mesh."""

    def make():
        import keras_psplus as psp

        mesh = psp.DeviceMesh((rows, columns), ("batch", "model"))
        return psp.ModelParallelStrategy(mesh=mesh, **_PATIENT, **options)

    return make


def _hybrid(ps=1, caches=False, workers=2, **options):
    """Tables on servers, but for those whose names say otherwise; perhaps with copies of rows."""

    def make():
        import keras_psplus as psp
        from tests.hybrid import models  # noqa: F401 - Servers know the classes in it.

        if caches:
            stale = psp.tables.Cache(150, staleness=STALENESS)
            options["cache"] = {"stale*": stale}
        placement = {"on_workers/*": "mirrored", "*": "parameter_server"}
        return psp.HybridStrategy(placement=placement, job_token="a token", **_PATIENT, **options)

    # Servers keep all tables, whose methods they serve anew with each further one.
    return Layout(make, workers=workers, ps=ps, most_cases=12)


_all_reduce = functools.partial(_makes, "MultiWorkerMirroredStrategy", **_PATIENT)
_served = functools.partial(Layout, workers=2, ps=2)
LAYOUTS = {
    "plain": Layout(_plain),
    # Two replicas, two stages, or two pipelines of two stages in one process.
    "devices2": Layout(_makes("MultiWorkerMirroredStrategy", devices=2)),
    "stages2": Layout(_makes("PipelineStrategy", devices=2, microbatches=3)),
    "pipelines4": Layout(_makes("PipelineStrategy", devices=4, microbatches=2, pipelines=2)),
    "ar2": Layout(_all_reduce(), workers=2),
    "ar3": Layout(_all_reduce(), workers=3),
    "ar4": Layout(_all_reduce(), workers=4),
    # Two workers with two devices each, which are a group.
    "hosts": Layout(_all_reduce(devices=2, topology=[["worker-0"], ["worker-1"]]), workers=2),
    "ar2x2": Layout(_all_reduce(devices=2), workers=2),
    "opt2": Layout(_all_reduce(shard="optimizer"), workers=2),
    "opt3": Layout(_all_reduce(shard="optimizer"), workers=3),
    "opt4_groups": Layout(_all_reduce(shard="optimizer", shard_group=2), workers=4),
    "opt4_topology": Layout(_all_reduce(shard="optimizer", topology=[[3, 0], [2, 1]]), workers=4),
    "all2": Layout(_all_reduce(shard="all"), workers=2),
    "all3": Layout(_all_reduce(shard="all"), workers=3),
    "all4_groups": Layout(_all_reduce(shard="all", shard_group=2), workers=4),
    "all4_topology": Layout(_all_reduce(shard="all", topology=[[0, 3], [1, 2]]), workers=4),
    "tp2": Layout(_mesh(1, 2), workers=2),
    "tp4": Layout(_mesh(2, 2), workers=4),
    "tp4_shards": Layout(_mesh(2, 2, shard="optimizer"), workers=4),
    "tp4_all": Layout(_mesh(2, 2, shard="all"), workers=4),
    "tp4x1_all": Layout(_mesh(4, 1, shard="all"), workers=4),
    "tp4_shards_int8": Layout(
        _mesh(2, 2, shard="optimizer", compression={"gradients": "int8", "weights": "int8"}),
        workers=4,
    ),
    "tp8_topology": Layout(_mesh(4, 2, topology=[[0, 1, 2, 3], [4, 5, 6, 7]]), workers=8),
    "pipeline2": Layout(_makes("PipelineStrategy", microbatches=3), workers=2, chief=True),
    # One process for what plain Keras lacks, such as tables of any keys.
    "hybrid1": Layout(_makes("HybridStrategy")),
    "hybrid_devices2": Layout(_makes("HybridStrategy", devices=2)),
    "hybrid22": _hybrid(ps=2, caches=True),
    "hybrid41": _hybrid(workers=4),
    "hybrid21_ahead": _hybrid(prefetch=True),
    "hybrid21_async": _hybrid(prefetch=True, sync=False),
    "hybrid21_compressed": _hybrid(row_compression="bf16", pull_compression="int8"),
    "hybrid21_shards": _hybrid(shard="optimizer"),
    "hybrid21_all": _hybrid(shard="all"),
    "pipedream2": Layout(_makes("PipelineStrategy", schedule="pipedream"), workers=2, chief=True),
    "pipelines2x2": Layout(
        _makes("PipelineStrategy", microbatches=2, pipelines=2), workers=4, chief=True
    ),
    "sync22": _served(_makes("ParameterServerStrategy", mode="sync", **_PATIENT), chief=True),
    "async22": _served(
        _makes("ParameterServerStrategy", overlap_steps=True, **_PATIENT), chief=True
    ),
    # One asynchronous worker does what one process does.
    "async_threads": Layout(_servers_in_process(1, overlap_steps=True)),
    "async_sharded": Layout(_servers_in_process(1, shards=2, overlap_steps=True)),
    "sync_threads": Layout(_servers_in_process(2, mode="sync")),
    "sync_sharded": Layout(_servers_in_process(2, shards=2, mode="sync")),
}
