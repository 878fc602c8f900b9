"""Faults of kinds that have really occurred here, each a small change of the package's text."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A change that breaks something and raises nothing.

    Attributes:
        name: Name, in a few words.
        breaks: The consequence, for the manual's table.
        file: File in the package.
        before: Text that occurs once in the file.
        after: Text that takes its place.
        tests: Files and folders below `tests` that exercise it, the cheapest first.
    """

    name: str
    breaks: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


FAULTS = (
    # Compression.
    Fault(
        "a residual dropped",
        "what earlier steps left out of a gradient never arrives",
        "compression/error_feedback.py",
        "        residual = total - tf.cast(own, tf.float32)\n",
        "        residual = tf.cast(tensor, tf.float32) - tf.cast(own, tf.float32)\n",
        ("compression/test_error_feedback.py", "compression/test_averaging.py", "fidelity"),
    ),
    Fault(
        "another worker's residual",
        "a worker keeps what the first worker left out of its sum, not what it left out itself",
        "all_reduce/collectives/hop.py",
        "coding.keep(lambda: rows[self.place : self.place + 1])",
        "coding.keep(lambda: rows[:1])",
        ("sharding/test_routes.py", "all_reduce/test_compression.py", "fidelity"),
    ),
    Fault(
        "a NaN that is not sent",
        "top-k takes NaN for a small element, so that an overflow goes unseen",
        "compression/sparse.py",
        "    candidates = _indices_of_false(tf.abs(row) <= threshold)\n",
        "    candidates = _indices_of_false(~(tf.abs(row) > threshold))\n",
        ("compression/test_sparsify.py", "compression/test_all.py", "compression"),
    ),
    # All-reduce.
    Fault(
        "an uneven batch unweighted",
        "a replica with fewer rows of the last batch counts as much as the others",
        "all_reduce/step/replica_step.py",
        "tf.cast(local_rows, tf.float32) / tf.maximum(global_rows, 1.0)",
        "tf.constant(1.0 / self.replicas)",
        ("all_reduce/test_replica_step.py", "multi_process/test_equals_one_process.py"),
    ),
    Fault(
        "a gradient once for each replica",
        "replicas add up gradients of their own means, which are too large by their number",
        "core/batch/losses.py",
        "            given[i] = step.scale_by_batch_fraction(seed)\n",
        "            given[i] = seed\n",
        ("all_reduce/test_replica_step.py", "smoke"),
    ),
    Fault(
        "a barrier skipped",
        "replicas do not meet after they have pushed rows to servers, and read too early",
        "all_reduce/step/replica_step.py",
        "bool(parts or self.has_pushed or not self.passed_barrier)",
        "bool(parts or not self.passed_barrier)",
        ("all_reduce/test_replica_step.py", "hybrid/test_training.py"),
    ),
    Fault(
        "a bucket's order",
        "a bucket is sent before a later gradient of its own is there, and holds up the others",
        "all_reduce/collectives/hop.py",
        "in sorted(closed, key=lambda one: one[0])]",
        "in closed]",
        ("all_reduce/test_collectives.py", "all_reduce/test_compression.py"),
    ),
    Fault(
        "a seed shared by replicas",
        "all replicas draw the same dropout masks for their different rows",
        "all_reduce/engine.py",
        "step.rank * _SEED_STRIDE % (1 << 31)",
        "0 * step.rank * _SEED_STRIDE % (1 << 31)",
        ("multi_process/test_behaviours.py",),
    ),
    # Sharded state.
    Fault(
        "a wrong reduce-scatter offset",
        "a worker takes the first part of a value that is loaded, not its own",
        "sharding/variable.py",
        "value=piece[begin - start : finish - start]",
        "value=piece[: finish - begin]",
        ("sharding/test_variables.py", "sharding/test_shares.py"),
    ),
    Fault(
        "a step of a script that does not wait",
        "a worker changes its part of a weight while another one still reads it",
        "sharding/engine.py",
        "        if of_step and step is None:\n",
        "        if of_step and step is False:\n",
        ("multi_process/test_eager_gradients.py",),
    ),
    Fault(
        "a step of a loop that nobody counts",
        "a worker that reads after it gets another one's part from before its update",
        "sharding/engine.py",
        "_call_in_order(lambda: count_writes(written), written)",
        "_call_in_order(lambda: count_writes([]), written)",
        ("multi_process/test_eager_gradients.py",),
    ),
    Fault(
        "a penalty of one replica's gradients",
        "gradients of gradients do not go back to the rows of the other replicas",
        "all_reduce/step/replica_step.py",
        "sums([tensors[i] for i in there])",
        "[tensors[i] for i in there]",
        ("multi_process/test_gradients_of_gradients.py",),
    ),
    Fault(
        "rows that a log counts once",
        "the norm of a table's gradient, taken after the update, is that of joined rows",
        "core/graph/stand_ins.py",
        "            if i is None or isinstance(total, tf.IndexedSlices):\n",
        "            if i is None:\n",
        ("multi_process/test_gradients_of_gradients.py",),
    ),
    # Parameter servers.
    Fault(
        "a mean of means",
        "logs of a synchronous step weigh all workers alike, whatever their rows",
        "parameter_server/step_functions.py",
        "            means = parts @ changes\n",
        "            means = changes.mean(0)\n",
        ("parameter_server/test_step_totals.py", "parameter_server/test_sync_overlap.py"),
    ),
    Fault(
        "a lost worker's gradient twice",
        "a share that is computed again after a loss is added to what was there",
        "parameter_server/context.py",
        "            if share in self._admitted:\n                self.is_void = True\n",
        "",
        ("parameter_server/test_step_totals.py", "parameter_server/test_sync_overlap.py"),
    ),
    # Tables on servers.
    Fault(
        "a push that nobody waits for",
        "a replica arrives at the barrier before servers have what it has pushed",
        "hybrid/tables/prefetch.py",
        "        with tf.control_dependencies(answers):\n",
        "        with tf.control_dependencies(answers[:0]):\n",
        ("hybrid/test_barrier.py", "hybrid/test_training.py"),
    ),
    Fault(
        "a push counted twice",
        "a gradient that is sent again, as its answer was late, is applied again",
        "hybrid/server/shard.py",
        "return tf.cond(key > last_seen, ",
        "return tf.cond(key >= last_seen, ",
        ("hybrid/test_table_server.py", "hybrid/test_faults.py"),
    ),
    Fault(
        "a stale row",
        "a worker reads its copy of a row for one update longer than it may",
        "hybrid/tables/row_cache.py",
        "            is_read = now - self._read_at[places] > self._staleness\n",
        "            is_read = now - self._read_at[places] > self._staleness + 1\n",
        ("hybrid/test_cache.py",),
    ),
    Fault(
        "a slot left out of a backup",
        "a table's first slot is not in the servers' files, and a resumed job begins with its "
        "first value",
        "hybrid/server/server_files.py",
        "shard.slots[i] for i in range(slots)})",
        "shard.slots[i] for i in range(1, slots)})",
        ("hybrid/test_table_files.py", "hybrid/test_table_server.py", "hybrid/test_usage.py"),
    ),
    # Data and backups.
    Fault(
        "a row of a smaller batch",
        "workers cut the last batch by what the others need, and one of its rows is never trained",
        "core/batch/batches.py",
        "        smallest = batch_size if is_even else max(1, batch_size - 2 * self.replicas)\n",
        "        smallest = batch_size\n",
        ("core/test_batches.py", "datasets/test_rows_before_maps.py"),
    ),
    Fault(
        "one batch too many on resume",
        "a resumed epoch begins one execution late, and its rows are not trained",
        "core/data_position.py",
        "    for _ in range(0, batches, several):\n",
        "    for _ in range(0, batches + several, several):\n",
        ("core/test_data_position.py", "faults"),
    ),
    # Cluster.
    Fault(
        "changes added up",
        "rounds of LocalSGD on servers add up what workers have changed, and take no mean",
        "parameter_server/worker_updates.py",
        "        scale = 1.0 / self._rounds.num_workers\n",
        "        scale = 1.0\n",
        ("parameter_server/test_updates.py",),
    ),
    Fault(
        "an exit that nobody hears of",
        "the other workers are not told that one has left with an exit code of failure",
        "core/jobs/failure.py",
        "    if signals.is_bad() and _reported_at is None:\n",
        "    if signals.last() is None and _reported_at is None:\n",
        ("core/test_failure.py", "multi_process/test_failures.py"),
    ),
    Fault(
        "a worker's error swallowed",
        "an asynchronous step that fails on a worker is dropped, and training goes on",
        "parameter_server/queue.py",
        "                closure.fail(error)\n                self.fail(error)\n",
        "                closure.fail(error)\n",
        ("parameter_server/test_recovery.py", "parameter_server/test_jobs.py"),
    ),
    Fault(
        "a sum kept by all replicas",
        "sums of `gradient_accumulation_steps` that a backup has made global count for each worker",
        "all_reduce/step/updating.py",
        "            for variable in _accumulators(optimizer) if rank else ():\n",
        "            for variable in _accumulators(optimizer)[:0] if rank else ():\n",
        ("all_reduce/test_replica_step.py", "faults/test_steps.py"),
    ),
    Fault(
        "eleven workers in the order of their names",
        "worker 10's rows and sums are taken for worker 2's",
        "all_reduce/collectives/operations.py",
        "    return sorted(range(len(names)), key=lambda rank: names[rank])\n",
        "    return sorted(range(len(names)))\n",
        ("all_reduce/test_member_order.py",),
    ),
    Fault(
        "rows in the order of groups",
        "with groups that are no ranges, workers take each other's rows of a sum",
        "all_reduce/topology/group_topology.py",
        "for rank in sorted(peers)]",
        "for rank in peers]",
        ("sharding/test_routes.py", "sharding/test_shares.py"),
    ),
    Fault(
        "a stop taken for the others' silence",
        "a worker that was stopped for a while takes all others for dead",
        "all_reduce/liveness.py",
        "            self._since.clear()\n            silent = ()\n",
        "            self._since.clear()\n",
        ("all_reduce/test_heartbeat.py",),
    ),
    Fault(
        "workers that build different models",
        "what workers make is compared by its kind alone",
        "core/jobs/control.py",
        'theirs.split("\\n")[:2] != message.split("\\n")[:2]',
        'theirs.split("\\n")[:1] != message.split("\\n")[:1]',
        ("core/test_control.py", "all_reduce/test_failure.py", "multi_process/test_failures.py"),
    ),
    Fault(
        "a norm of one part",
        "each worker clips its part of a gradient by that part's norm",
        "sharding/sums.py",
        "    for i, total in zip(parts, sum_over_parts([squares[i] for i in parts])):\n"
        "        squares[i] = total\n",
        "",
        ("sharding/test_places.py", "sharding/test_shares.py"),
    ),
    Fault(
        "a gradient of one part",
        "the gradient that flows back through a cut layer lacks the other workers' summands",
        "tensor_parallel/group.py",
        "        return _linear(tf.identity, self.sum, self.enter, whole)\n",
        "        return _linear(tf.identity, tf.identity, self.enter, whole)\n",
        ("tensor_parallel/test_group.py", "tensor_parallel/test_model_parallel.py"),
    ),
    Fault(
        "a stale copy of the weights",
        "steps that overlap go on from copies after the script has set weights",
        "parameter_server/sync_steps.py",
        "        return writes.count, self._context.extended.worker_states.losses\n",
        "        return 0, self._context.extended.worker_states.losses\n",
        ("parameter_server/test_step_totals.py", "parameter_server/test_sync_overlap.py"),
    ),
    Fault(
        "a step that overtakes",
        "an asynchronous step reads variables before its worker's step before has updated them",
        "parameter_server/step_functions.py",
        "                user._add_control_input(is_free)\n",
        "                assert is_free is not user\n",
        ("parameter_server/test_steps.py",),
    ),
    Fault(
        "rows of the wrong step",
        "rows that are read ahead are those after the update in one worker, before it in another",
        "hybrid/rows.py",
        "tf.equal(step + 1, self._version.read_value())",
        "tf.equal(step, self._version.read_value())",
        ("hybrid/test_prefetch.py",),
    ),
    Fault(
        "rows summed before they are clipped",
        "a row that a batch looks up twice is clipped by its sum's norm, not row by row",
        "core/batch/duplicate_rows.py",
        "    return type(inner) is keras.optimizers.SGD and not clips\n",
        "    return type(inner) is keras.optimizers.SGD\n",
        ("core/test_duplicate_rows.py", "all_reduce"),
    ),
    # Pipelines.
    Fault(
        "micro-batches weighted alike",
        "a layer's loss counts as much for a micro-batch of fewer rows",
        "pipeline/microbatches.py",
        "tf.add_n([loss * (size / rows) for loss, size in zip(losses, sizes)])",
        "tf.add_n([loss / len(sizes) for loss, size in zip(losses, sizes)])",
        ("pipeline/test_microbatches.py", "pipeline/test_training.py"),
    ),
    Fault(
        "gradients of the first rows",
        "every micro-batch has the gradients of the first one's outputs",
        "pipeline/boundary.py",
        "_rows(gradient, first, size) for",
        "_rows(gradient, 0, size) for",
        ("pipeline/test_training.py",),
    ),
    Fault(
        "another mask when a layer is recomputed",
        "dropout in the backward pass drops other units than in the forward pass",
        "pipeline/boundary.py",
        "            return next(self._seeds)\n",
        "            return draw()\n",
        ("pipeline/test_recompute.py",),
    ),
    Fault(
        "a schedule that runs ahead",
        "each stage keeps the activations of one more micro-batch",
        "pipeline/schedule.py",
        "min(stages - k, microbatches)",
        "min(stages - k + 1, microbatches)",
        ("pipeline/test_schedule.py",),
    ),
    # Update rules.
    Fault(
        "an uneven batch in a sum",
        "accumulated gradients count alike, whatever the rows of their batches",
        "updates/accumulate.py",
        "        _, rows = step.rows()\n",
        "        rows = tf.constant(1.0)\n",
        ("updates/test_rules.py", "all_reduce/test_updates.py", "parameter_server/test_updates.py"),
    ),
    Fault(
        "rows of an earlier round",
        "a worker's weights count by its rows of all rounds, not of this one",
        "updates/local_sgd.py",
        "        self._seen.assign(tf.zeros_like(self._seen), read_value=False)\n",
        "",
        ("updates/test_rules.py", "all_reduce/test_updates.py"),
    ),
    Fault(
        "an outer step from the wrong weights",
        "DiLoCo's outer optimizer changes each worker's own weights, not the common ones",
        "updates/local_sgd.py",
        "            for one, anchor in zip(own, self._anchors):\n"
        "                one.assign(anchor.read_value(), read_value=False)\n"
        "            with step",
        "            with step",
        ("updates/test_rules.py", "all_reduce/test_updates.py"),
    ),
    Fault(
        "an infinite metric",
        "a metric that has become infinite is NaN from the next batch on",
        "core/graph/metrics.py",
        "    return tf.where(tf.equal(after, before), tf.zeros_like(after), after - before)\n",
        "    return after - before\n",
        ("all_reduce/test_replica_step.py",),
    ),
    Fault(
        "a seed drawn twice",
        "two calls of `fit` in a row shuffle their data alike",
        "core/seeds.py",
        "        self._count += 1\n",
        "",
        ("core/test_data_seeds.py",),
    ),
    Fault(
        "another order of the data",
        "a resumed job shuffles by a seed of its own, and trains some rows twice",
        "core/backup/fit_progress.py",
        "        return self._saved_seed if awaited and self._saved_seed is not None else drawn\n",
        "        return drawn\n",
        ("core/test_fit_progress.py", "faults/test_steps.py", "faults/test_faults.py"),
    ),
    Fault(
        "residuals that are not restored",
        "a resumed job begins without what compressors had left out",
        "core/worker_state.py",
        "state.by_unit(owner_name, arrays)",
        "state.by_unit(owner_name, {})",
        ("core/test_worker_state.py", "faults/test_worker_states.py", "faults/test_steps.py"),
    ),
    Fault(
        "epochs that were never trained",
        "a resumed `fit` with `initial_epoch` skips that many epochs of the data",
        "core/backup/fit_progress.py",
        "            self._skips = epoch - self.first_epoch, ",
        "            self._skips = epoch, ",
        ("core/test_fit_progress.py", "faults/test_backup.py"),
    ),
    Fault(
        "patience that begins again",
        "EarlyStopping in a resumed job has forgotten how long it has waited",
        "core/backup/training_state.py",
        '"wait stopped_epoch best best_epoch"',
        '"stopped_epoch best best_epoch"',
        ("core/test_fit_progress.py", "faults/test_backup.py"),
    ),
    Fault(
        "a damaged backup",
        "the digests of a backup's files are not compared, and a job resumes from a damaged one",
        "core/backup/store.py",
        "        problem = integrity.problem_of(file_utils.join(path, name), expected)\n",
        "        problem = None\n",
        ("core/test_store.py", "faults/test_backup.py"),
    ),
    Fault(
        "a list before what it lists",
        "a reader finds the list of a table's new files before these",
        "files/atomic.py",
        'found = sorted(os.listdir(own), key=lambda n: (n.endswith(".json"), n == name))',
        "found = sorted(os.listdir(own))",
        ("files/test_atomic.py", "hybrid/test_table_files.py", "serving"),
    ),
    Fault(
        "a failure's exit code",
        "a job whose worker ends with an error of its own is said to have ended well",
        "cluster/launcher/task_ends.py",
        "self.chief_has_ended_well and is_worker and code < 0",
        "self.chief_has_ended_well and is_worker",
        ("cluster/test_launcher.py", "cluster/test_processes.py"),
    ),
    Fault(
        "restarts that do not count",
        "workers that were started again by themselves leave a job as many restarts as before",
        "cluster/processes.py",
        "        restart += result.task_restarts\n",
        "",
        ("cluster/test_launcher.py", "cluster/test_processes.py"),
    ),
    Fault(
        "an evaluation's bytes",
        "what a validation sends is taken for the training steps'",
        "callbacks.py",
        "            self._start += Totals.of(self._communication) - self._before_test\n",
        "            self._start += self._before_test - self._before_test\n",
        ("callbacks/test_communication_monitor.py",),
    ),
    # Dynamic tables.
    Fault(
        "an expired row that comes back",
        "an update of a key that has expired goes on from its old row",
        "tables/admission.py",
        "        living = self.living(key_rows, rows)\n"
        "        late = tf.gather(rows, places_of(living < rows))\n"
        "        key_rows.remove(late)\n"
        "        return living\n",
        "        return rows\n",
        ("tables/test_store.py", "tables"),
    ),
    Fault(
        "an expired key that is served",
        "rows that have expired stay in the versions of a table that are published",
        "tables/snapshot.py",
        "    gone.append(keys[~lives])\n",
        "",
        ("tables/test_changes.py", "serving"),
    ),
)
