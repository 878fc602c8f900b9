"""`HybridStrategy` for Keras 3."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus import activation, catalogue
from keras_psplus import updates as updates_module
from keras_psplus.all_reduce import shard_option
from keras_psplus.all_reduce.collectives.hop import DEFAULT_BUCKET_BYTES
from keras_psplus.all_reduce.data.elements import BatchAndNext
from keras_psplus.all_reduce.startup import start, workers_of
from keras_psplus.all_reduce.strategy import MultiWorkerMirroredStrategy
from keras_psplus.all_reduce.topology import group_topology as topology_module
from keras_psplus.arguments import flag, folder, seconds, text, whole_number
from keras_psplus.cluster import config, serving
from keras_psplus.cluster.channel import Secret
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.discovery import find
from keras_psplus.cluster.handshake import PeerIdentity
from keras_psplus.cluster.preflight import listen_on_own_address
from keras_psplus.compression import Compressor
from keras_psplus.core.jobs.control import run_on_chief
from keras_psplus.files import tables as shard_files
from keras_psplus.hybrid import calls, saving
from keras_psplus.hybrid.engine import HybridEngine, TableContext
from keras_psplus.hybrid.extended import HybridExtended
from keras_psplus.hybrid.rows import RowCodec, compressor_for_rows
from keras_psplus.hybrid.server import table_server
from keras_psplus.hybrid.server_tables import Recovery, ServerTables
from keras_psplus.hybrid.servers import Servers, StallProbe
from keras_psplus.hybrid.tables import placement as placement_module
from keras_psplus.hybrid.tables import prefetch as prefetch_module
from keras_psplus.hybrid.tables.placement import Tables
from keras_psplus.tables.policies import Cache
from keras_psplus.updates import Updates

# For which a server that cannot be reached is called again before the job counts as lost.
_PATIENCE = 5.0


class HybridStrategy(MultiWorkerMirroredStrategy):
    """Large embeddings on parameter servers, everything else all-reduced, for `model.fit`.

    One script in every task of a cluster with `worker` tasks (and perhaps a `chief`) and `ps`
    tasks. In `ps` tasks the constructor does not return: it serves tables until the chief (or
    worker 0) has ended, and then ends the process. The workers train as under
    `MultiWorkerMirroredStrategy`. The table of a `keras.layers.Embedding` that is large enough lies
    on the servers, row `r` on server `r % servers`: a worker asks for the rows that its part of a
    batch needs, and sends their gradients; the servers sum these over the workers and apply the
    model's own optimizer to the rows that were touched. Without `TF_CONFIG` the process trains
    alone, tables and all.

    Args:
        communication_options: As for `MultiWorkerMirroredStrategy`.
        placement: Which tables lie on parameter servers: `"auto"`, those of at least
            `min_table_bytes` for which that sends fewer bytes; `"parameter_server"`, all;
            `"mirrored"`, none; a dict from patterns of variables' paths, such as
            `"*user*/embeddings"`, to one of these; or a function of a path, the number of rows and
            that of numbers in a row, which returns one of these.
        min_table_bytes: Size in bytes below which `"auto"` keeps a table on the workers.
        sync: Whether the gradients of all workers for one step are summed and applied once, before
            the next step reads the table. Otherwise each is applied when it arrives.
        prefetch: Whether `model.fit` reads the next batch's rows while a step computes: as they are
            before that step's update, so that gradients are of rows one update old.
        row_compression: How gradients of rows are sent: `"bf16"`, `"fp16"`, `"int8"`, a compressor
            with `encode_rows`, or None to send them as they are.
        pull_compression: The same for rows that workers read.
        cache: A `tables.Cache` of each table on the servers, or a dict from patterns of variables'
            paths to such caches: workers keep copies of the hottest rows. None for no copies.
        table_timeout: Seconds that a parameter server may take to answer; five times as long in a
            process's first step, in which servers make their functions ready.
        tables_dir: Folder below which backups and `save_tables` may have the servers write. By
            default any, or the one in which their tasks were started if the job has no token.
        job_token: Secret that all tasks of the job have in common, a long random text, by which
            servers know who may call them. It is never sent. By default the environment's
            `KERAS_PSPLUS_JOB_TOKEN`, or the cluster's description, which is no secret.
        startup_timeout: As for `MultiWorkerMirroredStrategy`.
        heartbeat_timeout: As for `MultiWorkerMirroredStrategy`.
        stall_warning: As for `MultiWorkerMirroredStrategy`.
        bucket_bytes: As for `MultiWorkerMirroredStrategy`.
        compression: How the gradients of what is all-reduced are sent.
        updates: Only `Accumulate` can be combined with tables.
        topology: The path of the gradients of what is all-reduced.
        shard: `"optimizer"` to leave each worker a part of the optimizer's state of what is no
            table, `"all"` a part of its weights, too, as for `MultiWorkerMirroredStrategy`.
        reshard_after_forward: As for `MultiWorkerMirroredStrategy`.
        shard_group: As for `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: If an argument is out of range, or a combination of them has no meaning.
        keras_psplus.cluster.ClusterConfigError: If `TF_CONFIG` is wrong or has no ps.
        keras_psplus.cluster.ClusterStartupError: If a task does not come up in time.

    Example:

    ```python
    strategy = keras_psplus.HybridStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Embedding(1_000_000, 32), keras.layers.Flatten(), keras.layers.Dense(10)]
        )
        model.compile(optimizer="adagrad", loss="mse")
    model.fit(dataset, epochs=3)
    ```

    Reference: Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural
    Networks", EuroSys 2019.
    """

    _engine_class, _extended_class = HybridEngine, HybridExtended
    _start = staticmethod(functools.partial(start, allow_ps=True))

    def __init__(
        self,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        placement: str | dict[str, str] | Callable[[str, int, int], str] = "auto",
        min_table_bytes: int = 1 << 20,
        sync: bool = True,
        prefetch: bool = False,
        row_compression: str | Compressor | None = None,
        pull_compression: str | Compressor | None = None,
        cache: Cache | dict[str, Cache] | None = None,
        table_timeout: float = 60.0,
        tables_dir: str | os.PathLike[str] | None = None,
        job_token: str | None = None,
        startup_timeout: float = 300.0,
        heartbeat_timeout: float = 20.0,
        stall_warning: float | None = 60.0,
        bucket_bytes: float = DEFAULT_BUCKET_BYTES,
        compression: str | dict[str, Any] | Compressor | None = None,
        updates: str | Updates | None = None,
        topology: str | Sequence[Sequence[str | int]] | None = None,
        shard: str | None = None,
        reshard_after_forward: bool = True,
        shard_group: int | None = None,
    ) -> None:
        activation.activate()
        compression, updates = catalogue.fill(
            type(self).__name__, compression=compression, updates=updates
        )
        placement_module.check_placement(placement)
        min_table_bytes = whole_number("min_table_bytes", min_table_bytes, 0)
        seconds("table_timeout", table_timeout)
        seconds("startup_timeout", startup_timeout)
        sync, prefetch = flag("sync", sync), flag("prefetch", prefetch)
        text("job_token", job_token)
        folder("tables_dir", tables_dir)
        push = compressor_for_rows("row_compression", row_compression)
        pull = compressor_for_rows("pull_compression", pull_compression)
        placement_module.check_caches(cache, prefetch)
        updates = updates_module.get(updates)
        assert not isinstance(updates, str)
        if updates is not None and updates.local:
            raise ValueError(
                "Of `updates`, `Accumulate` alone can be combined with tables on parameter "
                "servers: workers that step alone would share them all the same. "
                f"Received: updates={updates!r}"
            )
        task = find.find_task_config()
        find.refuse_evaluator("HybridStrategy", task)
        # Also in `ps` tasks, which would wait for workers that have refused it.
        workers = workers_of(task)
        groups = topology_module.get(topology, workers)
        exchanged = shard, shard_group, compression, updates, groups
        shard_option.check_all(*exchanged, workers, self._engine_class)
        shard_option.check_reshard(shard, reshard_after_forward)
        if task is not None and not task.num_ps:
            raise config.ClusterConfigError(
                "HybridStrategy needs at least one `ps` task for its tables: add it to TF_CONFIG's "
                "cluster, start the script by `keras-psplus run --workers 2 --ps 1`, or use "
                f"MultiWorkerMirroredStrategy. Received: {task.describe()}"
            )
        self._sync, self._has_servers = sync, task is not None
        self._prefetch = prefetch and task is not None
        self._context: TableContext | None = None
        self._extended_options = {
            "is_sync": sync and self._has_servers,
            "reads_ahead": self._prefetch,
        }
        if task is not None:
            secret = Secret(calls.token_of(task, job_token))
            agreed = json.dumps([sync, prefetch, repr(pull), repr(push), task.cluster])
            if task.task_type == "ps":
                is_free = tables_dir is None and calls.is_secret(job_token)
                folders = None if is_free else [shard_files.full_path(tables_dir or os.getcwd())]
                options = {
                    "server": task.task_index,
                    "servers": task.num_ps,
                    "pull_compressor": pull,
                    "push_compressor": push,
                    "sync": sync,
                    "keeps_undo_log": sync and prefetch,
                }
                serving.end_process_after(
                    lambda: table_server.serve(
                        *(task, secret, options, agreed, startup_timeout, folders)
                    )
                )
        with catalogue.settled():
            super().__init__(
                None,
                communication_options,
                startup_timeout=startup_timeout,
                heartbeat_timeout=heartbeat_timeout,
                stall_warning=stall_warning,
                bucket_bytes=bucket_bytes,
                compression=compression,
                updates=updates,
                topology=topology,
                shard=shard,
                reshard_after_forward=reshard_after_forward,
                shard_group=shard_group,
            )
        self._options |= {
            "placement": placement,
            "sync": sync,
            "prefetch": prefetch,
            "row_compression": row_compression,
            "pull_compression": pull_compression,
            "cache": cache,
        }
        if task is None:
            return
        if task.num_workers == 1:
            # Nothing else is at this address, by which the servers see that the job goes on.
            self._listener = listen_on_own_address(
                task, PeerIdentity.of(task), startup_timeout, print
            )
        patience = _PATIENCE if sync else table_timeout
        servers = Servers(
            *(task, secret, table_timeout, patience),
            recovers=not sync,
            has_begun=lambda: self.progress.steps > 0,
        )
        servers.greet(agreed, self.num_replicas_in_sync, startup_timeout)
        placer = placement_module.TablePlacer(
            placement,
            min_table_bytes,
            self.num_replicas_in_sync,
            lambda dim: RowCodec(pull, dim).width,
            lambda dim: RowCodec(push, dim).width,
            cache,
        )
        extended = self.extended
        tables = Tables(
            *(servers, extended.control, self.is_chief, pull, push),
            *(extended.rows_ahead, extended.row_caches),
        )
        backup_tables = ServerTables(servers, tables, sync)
        self._context = TableContext(servers, tables, placer, backup_tables)
        # Steps overlap what they wait for from servers: seconds of that are not counted.
        self.communication.add_source(extended.table_traffic.traffic, lambda: 0.0)
        if self.is_chief and not sync:
            Recovery(servers, backup_tables, table_timeout).start()

    def _waits(self, task: TaskConfig) -> StallProbe:
        world = self.extended.world
        return StallProbe(
            *(task, self.progress, self._step_marks, world), self._sync, self._find_servers
        )

    def _find_servers(self) -> Servers:
        assert self._context is not None
        return self._context.servers

    @property
    def _distributes(self) -> bool:
        return self._has_servers or super()._distributes

    @property
    def _is_active(self) -> bool:
        """Whether there are several replicas, or parameter servers."""
        return self._has_servers or super()._is_active

    @property
    def sync(self) -> bool:
        """Whether a step's gradients of rows are summed over the workers and applied once."""
        return self._sync

    @property
    def prefetch(self) -> bool:
        """Whether `model.fit` reads the next batch's rows of tables while a step computes."""
        return self._prefetch

    def save_tables(self, directory: str | os.PathLike[str]) -> None:
        """Has the parameter servers write the tables, each its own rows, past the workers' memory.

        The optimizer's variables of the tables are written as well; dense weights are not. Call it
        between calls of `fit`, on the chief or on all workers, of whom the chief has it done.
        `load_tables` reads it, also on another number of servers, and `TableFiles` in any process.

        Args:
            directory: Folder that all parameter servers reach. On separate disks, each of them
                has to run on the same host when the tables are loaded.

        Raises:
            TableServerError: If a server cannot write there, or is lost. What was saved there
                before is as it was.
            OSError: If the chief cannot write there.

        Example:

        ```python
        model.fit(dataset)
        strategy.save_tables("/shared/tables")
        ```
        """
        if self.is_chief and self._context is not None:
            path = shard_files.full_path(directory)
            saving.save(self._context.servers, self._context.tables.all, path)

    def load_tables(self, directory: str | os.PathLike[str]) -> None:
        """Has the parameter servers read what `save_tables` has written; on all workers.

        Tables are found by their names. The optimizer's variables are read where the model is
        compiled with the same one, and `model.optimizer.build(model.trainable_variables)` or `fit`
        has been called.

        Args:
            directory: The folder.

        Raises:
            ValueError: If it does not have all tables, in these shapes.
            TableServerError: If a server cannot read there, or is lost.
        """
        if (context := self._context) is None:
            return
        path = shard_files.full_path(directory)
        run_on_chief(
            self.extended.control,
            self.is_chief,
            "load_tables",
            lambda: saving.load(context.servers, context.tables.all, path),
        )
        self.extended.rows_ahead.forget()
        self.extended.row_caches.forget()

    def _in_step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        in_step = super()._in_step(fn)
        with_lookahead = prefetch_module.with_lookahead(self.extended.rows_ahead, in_step)

        @functools.wraps(fn)
        def in_either(*args: Any, **kwargs: Any) -> Any:
            has_next = bool(args) and isinstance(args[0], BatchAndNext)
            return (with_lookahead if has_next else in_step)(*args, **kwargs)

        return tf.autograph.experimental.do_not_convert(in_either)
