"""Metrics of communication in the logs of `fit`: bytes sent, and waits."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.arguments import shown
from keras_psplus.communication import Communication, Totals, ratio
from keras_psplus.log import warn_once


class CommunicationMonitor(keras.callbacks.Callback):
    """Puts what training costs on the wire into the progress bar, the History and TensorBoard.

    Three numbers, of the epoch's training steps alone (what an evaluation sends is not in them):

    - `comm/bytes`: bytes on the wire for each step. With all-reduce, those that one worker sends;
      with parameter servers, those of all workers together.
    - `comm/ratio`: bytes of the tensors themselves over bytes of what was sent in their place.
    - `comm/seconds`: seconds for each step in which training waited for communication. These
      differ between workers: the logs have each worker's own, TensorBoard the longest of all.

    All workers have them in their logs, the chief writes them. A worker without this callback is
    not among the longest. A model that is trained without a strategy of this library has none of
    them.

    Args:
        log_dir: Folder for TensorBoard, in which the three are written as scalars at each epoch's
            end; None to write none.
        update_interval: Seconds for which the progress bar shows the same numbers. Under parameter
            servers they are those of the steps that have come back; what is on its way is not
            waited for.

    Raises:
        ValueError: If an argument is of no use.

    Example:

    ```python
    monitor = keras_psplus.callbacks.CommunicationMonitor(log_dir="logs")
    history = model.fit(dataset, epochs=3, callbacks=[monitor])
    print(history.history["comm/bytes"])
    ```
    """

    # Keras then does not hold up the next step for it. Batches may end on several threads.
    async_safe = True

    _start: Totals
    _before_test: Totals
    _steps: int
    _shown: dict[str, float]
    _next_update: float

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, update_interval: float = 0.2
    ) -> None:
        super().__init__()
        if log_dir is not None and not (isinstance(log_dir, (str, os.PathLike)) and str(log_dir)):
            raise ValueError(
                "`log_dir` must be the path of a folder, or None. "
                f"Received: log_dir={shown(log_dir)}"
            )
        number = isinstance(update_interval, numbers.Real) and not isinstance(update_interval, bool)
        if not number or not math.isfinite(update_interval) or update_interval < 0:
            raise ValueError(
                "`update_interval` must be a finite number of seconds that is not negative. "
                f"Received: update_interval={shown(update_interval)}"
            )
        self.log_dir = log_dir
        self.update_interval = update_interval
        self._lock = threading.Lock()
        self._communication: Communication | None = None
        self._is_chief, self._has_engine = True, False
        self._writer: tf.summary.SummaryWriter | None = None
        self._unwritten: tuple[int, dict[str, float]] | None = None
        self._begin_epoch()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        strategy = getattr(self.model, "distribute_strategy", None)
        communication = getattr(strategy, "communication", None)
        self._communication = communication if isinstance(communication, Communication) else None
        self._is_chief = getattr(strategy, "is_chief", True)
        # It asks all workers for their seconds when all callbacks have seen an epoch's end.
        self._has_engine = getattr(strategy, "engine", None) is not None
        if self._communication is None:
            warn_once(
                "CommunicationMonitor logs nothing: the model is not trained by a strategy of "
                "keras_psplus"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin_epoch()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._communication is None:
            return
        with self._lock:
            self._steps = max(self._steps, batch + 1)
            now = time.monotonic()
            if now >= self._next_update:
                self._shown = self._per_step()
                self._next_update = now + self.update_interval
            shown = self._shown
        if logs is not None:
            logs.update(shown)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._before_test = Totals.of(self._communication)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        # As if the epoch had begun later by what the evaluation took.
        with self._lock:
            self._start += Totals.of(self._communication) - self._before_test

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # The last of several steps per execution may be beyond the end of the data.
        steps = (self.params or {}).get("steps")
        self._steps = min(self._steps, steps or self._steps)
        if self._communication is None or not self._steps:
            return
        values = self._per_step()
        if not any(dataclasses.astuple(Totals.of(self._communication) - self._start)):
            warn_once("CommunicationMonitor: nothing was sent, as with a single replica")
        if logs is not None:
            logs.update(values)
        self._unwritten = (epoch, values)
        if not self._has_engine:
            self.write([self.seconds])

    @property
    def seconds(self) -> float | None:
        """The last epoch's `comm/seconds` on this worker; None if there is none to be written."""
        return None if self._unwritten is None else self._unwritten[1]["comm/seconds"]

    def write(self, seconds: Sequence[float | None]) -> None:
        """Writes the last epoch's numbers, on the chief; for the strategy's engine.

        Args:
            seconds: List with the `seconds` of each worker, None for workers without this callback.
        """
        if self._unwritten is None:
            return
        (epoch, values), self._unwritten = self._unwritten, None
        if self.log_dir is not None and self._is_chief:
            known = [own for own in seconds if own is not None]
            self._write(epoch, {**values, "comm/seconds": max(known)})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.write([self.seconds])  # if nothing has called it
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin_epoch(self) -> None:
        self._start = self._before_test = Totals.of(self._communication)
        self._steps = 0
        self._shown = {}
        self._next_update = -math.inf

    def _per_step(self) -> dict[str, float]:
        """The numbers of the epoch up to now, for each of its steps."""
        spent = Totals.of(self._communication) - self._start
        return {
            "comm/bytes": spent.wire_bytes / self._steps,
            "comm/ratio": ratio(spent.logical_bytes, spent.compressed_bytes),
            "comm/seconds": spent.seconds / self._steps,
        }

    def _write(self, epoch: int, values: dict[str, float]) -> None:
        if self._writer is None:
            assert self.log_dir is not None
            self._writer = tf.summary.create_file_writer(os.fspath(self.log_dir))
        with self._writer.as_default(), tf.summary.record_if(True):
            for name, value in values.items():
                tf.summary.scalar(name, value, step=epoch)
        self._writer.flush()
