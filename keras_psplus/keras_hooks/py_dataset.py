"""One order of a shuffled `keras.utils.PyDataset` for all workers."""

import numpy as np
from keras.src.trainers.data_adapters import py_dataset_adapter


class SharedOrder(py_dataset_adapter.PyDataset):
    """A `PyDataset` whose batches come in an order drawn anew for each epoch, from a seed.

    Args:
        py_dataset: The user's dataset.
        seed: Int, equal on all workers.
    """

    def __init__(self, py_dataset, seed):
        super().__init__(
            workers=py_dataset.workers,
            use_multiprocessing=py_dataset.use_multiprocessing,
            max_queue_size=py_dataset.max_queue_size,
        )
        self._py_dataset = py_dataset
        self._random = np.random.default_rng(seed)
        self._order = None
        self._draw()

    def _draw(self):
        self._order = self._random.permutation(self._py_dataset.num_batches)

    @property
    def num_batches(self):
        return self._py_dataset.num_batches

    def __getitem__(self, index):
        return self._py_dataset[int(self._order[index])]

    def on_epoch_begin(self):
        self._py_dataset.on_epoch_begin()

    def on_epoch_end(self):
        self._py_dataset.on_epoch_end()
        self._draw()


def share_order(adapter, seed):
    """Makes a shuffling `PyDatasetAdapter` shuffle by the seed; leaves all else as it is."""
    if not isinstance(adapter, py_dataset_adapter.PyDatasetAdapter) or not adapter.shuffle:
        return
    if adapter.py_dataset.num_batches is None:
        return
    adapter.py_dataset = SharedOrder(adapter.py_dataset, seed)
    adapter.shuffle = False
    if adapter.enqueuer is not None:
        adapter.enqueuer.py_dataset = adapter.py_dataset
        adapter.enqueuer.shuffle = False
