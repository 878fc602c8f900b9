"""Options of a strategy that a case swaps, as a process has one strategy, and that are put back."""

import contextlib
import pathlib
import tempfile

import keras
import tensorflow as tf


@contextlib.contextmanager
def swapped(
    *,
    compression=None,
    topology=None,
    updates=None,
    bucket_bytes=None,
    reshard_after_forward=True,
):
    """Has an all-reduce strategy train by other options in a block, and count its bytes from 0.

    Without a strategy, as where a case is the reference, nothing changes.

    Args:
        compression: As of the strategy.
        topology: As of the strategy; None for its own.
        updates: As of the strategy.
        bucket_bytes: As of the strategy.
        reshard_after_forward: As of the strategy.

    Yields:
        The strategy, or TensorFlow's default one.
    """
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy():
        yield strategy
        return
    from keras_psplus import updates as updates_module
    from keras_psplus.all_reduce import shard_option
    from keras_psplus.all_reduce.collectives.hop import DEFAULT_BUCKET_BYTES
    from keras_psplus.all_reduce.step.updating import MirroredUpdates
    from keras_psplus.all_reduce.topology import group_topology

    extended = strategy.extended
    of_strategy = ("_updates", "reshard_after_forward")
    own = {name: getattr(strategy, name) for name in of_strategy}
    of_extended = ("updating", "_hops", "_of_weights", "bucket_bytes", "levels", "reducers")
    inner = {name: getattr(extended, name, None) for name in of_extended}
    groups = strategy._topology
    if topology is not None:
        groups = group_topology.get(topology, [f"worker-{i}" for i in range(strategy.num_workers)])
    compression, of_weights = shard_option.compressors(compression, strategy._options.get("shard"))
    try:
        strategy.reshard_after_forward = reshard_after_forward
        strategy._updates = updates_module.get(updates)
        extended.updating = strategy._updates and MirroredUpdates(strategy._updates, strategy)
        extended._hops = group_topology.compressors_per_hop(compression, groups)
        extended._of_weights = of_weights
        extended.bucket_bytes = bucket_bytes or DEFAULT_BUCKET_BYTES
        extended.set_topology(groups)
        # Of `shard="all"`, made anew where the next one is asked for.
        vars(strategy.engine).pop("units", None)
        yield strategy
    finally:
        vars(strategy.engine).pop("units", None)
        vars(strategy).update(own)
        vars(extended).update(inner)


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Ends the third epoch before it begins, or after one of its batches."""

    def __init__(self, batch=None):
        super().__init__()
        self._batch, self._epoch = batch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        if epoch == 2 and self._batch is None:
            raise Interrupted

    def on_train_batch_end(self, batch, logs=None):
        if self._epoch == 2 and self._batch is not None and batch >= self._batch:
            raise Interrupted


def resumed(train, batch=None, save_freq="epoch", changes=lambda folder: None):
    """Trains until the third epoch, where training is interrupted, and once more from its backup.

    Each worker's backup is in a folder of its own.

    Args:
        train: Function of a callback or two that makes a model, trains it and returns something.
        batch: The batch of the third epoch after which it is interrupted, or with which the steps
            of one call end later; None before the first.
        save_freq: Of `BackupAndRestore`.
        changes: Function of the backup's folder, called between.

    Returns:
        What `train` returns.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(keras.callbacks.BackupAndRestore(folder, save_freq), Interrupt(batch))
            raise AssertionError("It has not been interrupted.")
        except Interrupted:
            pass
        changes(pathlib.Path(folder))
        return train(keras.callbacks.BackupAndRestore(folder, save_freq))
