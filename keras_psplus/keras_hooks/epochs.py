"""The number of steps of an epoch: that of its data, not of the first epoch's.

Keras counts the steps of the first epoch where data do not say how many they are, and takes no more
in later ones. Data that come shuffled out over workers, or from a service, have another number in
each epoch.
"""

from keras.src.callbacks import progbar_logger
from keras.src.trainers import epoch_iterator
from keras.src.trainers.data_adapters import tf_dataset_adapter

from keras_psplus import data_service
from keras_psplus.keras_hooks.ownership import of_this_library
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.keras_hooks.unknown_length import UnknownLength


def install():
    """Installs this module's hooks."""
    iterator = epoch_iterator.EpochIterator
    replace(iterator, "_enumerate_iterator", ["self"])(_enumerate)
    replace(iterator, "_interrupted_warning", ["self"])(_warn)
    replace(progbar_logger.ProgbarLogger, "on_epoch_end", ["self", "epoch", "logs"])(_end_progress)


def _is_ours(holder):
    return of_this_library(getattr(holder, "_distribute_strategy", None)) is not None


def _enumerate(original, self):
    if _is_ours(self):
        self._num_batches = self.data_adapter.num_batches
    return original(self)


def _warn(original, self):
    """Called where the data end before the steps that Keras expects."""
    if not _is_ours(self):
        return original(self)
    if self._steps_seen <= self.steps_per_execution:
        _check_that_data_came(self.data_adapter)
    elif self.steps_per_epoch is None and self.data_adapter.num_batches is None:
        return  # this is how data of unknown length end
    original(self)


def _check_that_data_came(adapter):
    if isinstance(adapter, UnknownLength):
        adapter = adapter.of
    if isinstance(adapter, tf_dataset_adapter.TFDatasetAdapter):
        data_service.check_rows_came(adapter.get_tf_dataset())


def _end_progress(original, self, epoch, logs=None):
    has_no_target = self.target is None
    original(self, epoch, logs)
    if has_no_target and _is_ours(self.model):
        self.target = None
