"""Layout of batches in a backup's data, compared with that of the resumed data."""

from __future__ import annotations

from typing import Any

from keras_psplus.core.data.unknown_length import UnknownLength
from keras_psplus.keras_internals.keras_parts import data_adapter
from keras_psplus.log import logger

_BATCHES, _SIZE, _LAST, _STEPS = "batches", "batch_size", "rows_of_last_batch", "steps_per_epoch"


def layout_of(iterator: Any) -> dict[str, int | None]:
    """Numbers of batches and rows of an epoch, independent of the number of workers."""
    adapter = iterator.data_adapter
    if isinstance(adapter, UnknownLength):
        adapter = adapter.of
    found = {
        _BATCHES: adapter.num_batches,
        _SIZE: adapter.batch_size,
        _LAST: _rows_of_last_batch(adapter),
        _STEPS: iterator.steps_per_epoch,
    }
    return {name: None if count is None else int(count) for name, count in found.items()}


def _rows_of_last_batch(adapter: data_adapter.DataAdapter) -> int | None:
    try:
        rows: int | None = adapter.partial_batch_size
        return rows
    except NotImplementedError:
        return None  # Keras does not say it of PyDatasets and generators.


def check(iterator: Any, saved: dict[str, int | None], epoch: int, batch: int) -> None:
    """Checks that training resumes with the same data, and logs differences.

    Args:
        iterator: Keras's epoch iterator.
        saved: What `layout_of` has returned for the data of the backup.
        epoch, batch: Where training goes on.

    Raises:
        ValueError: If that is in the middle of an epoch that has other batches.
    """
    own = layout_of(iterator)
    changed = [name for name in own if own[name] != saved.get(name, own[name])]
    if not changed:
        return
    differing = ", ".join(f"{name}={own[name]} for {saved[name]}" for name in changed)
    if batch:
        raise ValueError(
            f"The backup was made after {batch} batches of an epoch, and the data come in other "
            "batches now: some rows of this epoch would be trained twice, or not at all. Start the "
            "job again with the data and the batch size that it had, or delete the backup. "
            f"Received: {differing} in the backup"
        )
    logger.warning(
        "training goes on at epoch %d of a backup that was made with other data or another batch "
        "size. Received: %s in the backup",
        epoch + 1,
        differing,
    )
