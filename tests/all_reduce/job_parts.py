"""What several jobs under all-reduce are made of."""

import keras

from keras_psplus import compression
from keras_psplus.all_reduce import reducers


def compress(strategy, compressor, bucket_bytes=3000):
    """Gives a strategy other compressors, as a process has one strategy, and counts anew."""
    extended = strategy.extended
    extended._reducers = reducers.Reducers(
        extended._cross_device_ops.launchers,
        extended.world.rank,
        extended._num_replicas_in_sync,
        compression.with_error_feedback(compression.get(compressor)),
        bucket_bytes,
    )


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Stops after the second epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise Interrupted
