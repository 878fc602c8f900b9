"""One order of a shuffled `keras.utils.PyDataset` for all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from keras_psplus.keras_internals.keras_parts import py_dataset_adapter

if TYPE_CHECKING:
    import keras


class SharedShuffle(py_dataset_adapter.PyDataset):
    """A `PyDataset` whose batches are shuffled again each epoch, by a shared seed.

    Args:
        py_dataset: The user's dataset.
        seed: Int, equal on all workers.
    """

    def __init__(self, py_dataset: keras.utils.PyDataset, seed: int) -> None:
        super().__init__(
            workers=py_dataset.workers,
            use_multiprocessing=py_dataset.use_multiprocessing,
            max_queue_size=py_dataset.max_queue_size,
        )
        self._py_dataset = py_dataset
        self._random = np.random.default_rng(seed)
        self._order: np.ndarray[Any, Any]
        self._draw()

    def _draw(self) -> None:
        self._order = self._random.permutation(self._py_dataset.num_batches)

    @property
    def num_batches(self) -> int:
        return self._py_dataset.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._py_dataset[int(self._order[index])]

    def on_epoch_begin(self) -> None:
        self._py_dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._py_dataset.on_epoch_end()
        self._draw()


def share_shuffle(adapter: Any, seed: int) -> None:
    """Makes a shuffling `PyDatasetAdapter` shuffle by the seed; leaves all else as it is."""
    if not isinstance(adapter, py_dataset_adapter.PyDatasetAdapter) or not adapter.shuffle:
        return
    if adapter.py_dataset.num_batches is None:
        return
    adapter.py_dataset = SharedShuffle(adapter.py_dataset, seed)
    adapter.shuffle = False
    if adapter.enqueuer is not None:
        adapter.enqueuer.py_dataset = adapter.py_dataset
        adapter.enqueuer.shuffle = False
