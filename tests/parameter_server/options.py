"""Options of a strategy that lives on, changed for a case: a process has one strategy."""

import contextlib
import copy
from unittest import mock

# What `options` leaves as it is.
SAME = object()


@contextlib.contextmanager
def options(
    strategy,
    *,
    mode=None,
    backup_workers=0,
    max_staleness=None,
    compression=None,
    pull_compression=None,
    updates=None,
    overlap=False,
    partitioner=SAME,
):
    """Context in which a strategy's models are trained as if it were made with these options.

    Args:
        strategy: A `ParameterServerStrategy`; without one, or of another one, nothing changes.
        mode, backup_workers, max_staleness, compression, pull_compression, updates: As the
            strategy's arguments; its own mode by default.
        overlap: True, False, or None for "auto".
        partitioner: None for whole variables, or a number of shards; its own by default.
    """
    if getattr(strategy, "mode", None) is None:
        yield
        return
    import tensorflow as tf

    from keras_psplus.parameter_server import worker_function
    from keras_psplus.parameter_server.context import OverlapChoice, StepAttempts
    from keras_psplus.parameter_server.extended import Placement
    from keras_psplus.parameter_server.pulls import Compressors
    from keras_psplus.parameter_server.strategy import check_mode
    from keras_psplus.parameter_server.worker_updates import LocalSGDUpdates, WorkerUpdates

    context, extended = strategy._context, strategy.extended
    mode = check_mode(mode or strategy.mode, backup_workers, max_staleness)
    compressors = Compressors(compression, pull_compression)
    placement = extended.placement
    with contextlib.ExitStack() as stack:

        def swap(owner, **attributes):
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(owner, name, value))

        swap(
            context, mode=mode, overlap=OverlapChoice(overlap, context.num_workers, context.totals)
        )
        swap(strategy, _mode=mode)
        # Its gradients are counted anew; numbers of attempts go on.
        attempts = copy.copy(context.attempts)
        attempts.__dict__ |= StepAttempts(backup_workers).__dict__ | {"_stamps": attempts._stamps}
        swap(context, attempts=attempts)
        # A function that a case before has traced.
        swap(worker_function.writes, are_traced=False)
        # Bytes are counted anew, too.
        swap(context.totals, _bytes={})
        swap(extended, compressors=compressors)
        swap(extended.pushes, _compressors=compressors)
        # Bytes of the models before would be balanced as well.
        swap(extended, placement=Placement(placement.weights, placement._cuts_finely))
        if partitioner is not SAME:
            fixed = tf.distribute.experimental.partitioners.FixedShardsPartitioner
            swap(
                extended,
                _cuts_evenly=False,
                _variable_partitioner=fixed(partitioner) if isinstance(partitioner, int) else None,
            )
        queue = context.scheduler.queue
        swap(queue, on_lost=queue.on_lost)
        kind = LocalSGDUpdates if updates is not None and updates.local else WorkerUpdates
        swap(context, updating=kind(context, updates))
        yield
