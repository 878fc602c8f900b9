"""Data of which each worker has a share of its own: nobody knows how many steps there are."""

from keras.src.trainers.data_adapters import data_adapter


class UnknownLength(data_adapter.DataAdapter):
    """A data adapter whose number of steps shows only when all workers have run out."""

    def __init__(self, adapter):
        self._adapter = adapter

    def get_tf_dataset(self):
        return self._adapter.get_tf_dataset()

    def on_epoch_begin(self):
        self._adapter.on_epoch_begin()

    def on_epoch_end(self):
        self._adapter.on_epoch_end()

    @property
    def num_batches(self):
        return None

    @property
    def batch_size(self):
        return self._adapter.batch_size
