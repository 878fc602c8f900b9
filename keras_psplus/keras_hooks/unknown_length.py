"""Data of which each worker has a share of its own: nobody knows how many steps there are."""

from keras.src.trainers.data_adapters import data_adapter


class UnknownLength(data_adapter.DataAdapter):
    """A data adapter whose number of steps shows only when all workers have run out.

    Attributes:
        of: The data adapter of this worker's data.
    """

    def __init__(self, adapter):
        self.of = adapter

    def get_tf_dataset(self):
        return self.of.get_tf_dataset()

    def on_epoch_begin(self):
        self.of.on_epoch_begin()

    def on_epoch_end(self):
        self.of.on_epoch_end()

    @property
    def num_batches(self):
        return None

    @property
    def batch_size(self):
        return self.of.batch_size
