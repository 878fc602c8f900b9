"""Data adapter for workers' separate data, whose number of steps is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keras_psplus.datasets import service
from keras_psplus.keras_internals.keras_parts import data_adapter, tf_dataset_adapter

if TYPE_CHECKING:
    import tensorflow as tf


class UnknownLength(data_adapter.DataAdapter):
    """A data adapter whose number of steps shows only when all workers have run out.

    Attributes:
        of: The data adapter of this worker's data.
    """

    def __init__(self, adapter: data_adapter.DataAdapter) -> None:
        self.of = adapter

    def get_tf_dataset(self) -> tf.data.Dataset:
        return self.of.get_tf_dataset()

    def on_epoch_begin(self) -> None:
        self.of.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.of.on_epoch_end()

    @property
    def num_batches(self) -> None:
        return None

    @property
    def batch_size(self) -> int | None:
        size: int | None = self.of.batch_size
        return size


def check_rows_came(adapter: data_adapter.DataAdapter) -> None:
    """Sees that a lost data service is not taken for the end of data."""
    adapter = adapter.of if isinstance(adapter, UnknownLength) else adapter
    if isinstance(adapter, tf_dataset_adapter.TFDatasetAdapter):
        service.check_rows_came(adapter.get_tf_dataset())
