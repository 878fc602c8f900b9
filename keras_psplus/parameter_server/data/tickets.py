"""Batches that are ready on workers, and who trains on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.parameter_server.tracing.joined_batches import Batches, JoinedBatches
from keras_psplus.parameter_server.tracing.losses import is_of_worker
from keras_psplus.parameter_server.tracing.remote import to_chief

# Between two looks for batches, and for a worker that is free.
RETRY_SECONDS = 0.5
_FREE_SECONDS = 0.002


class Ticket:
    """Some batches of a share, in the memory of `home`, for a step of `worker`.

    `seconds` is how long it took to read them.
    """

    def __init__(
        self,
        home: int,
        share: int,
        batches: Batches,
        read_again: Callable[[int, int], Batches],
        seconds: float,
    ) -> None:
        self.home, self.share, self.batches, self.seconds = home, share, batches, seconds
        self.worker = home
        self._read_again = read_again
        self._is_used = False

    def payload_on(self, worker: int) -> Any:
        """A step's argument for a worker; batches are read again if they were lost."""
        if not self._is_used:
            self._is_used = True
            payload = _payload(self.batches)
            if worker == self.home:
                return payload
            try:
                return tf.nest.map_structure(to_chief, payload, expand_composites=True)
            except tf.errors.OpError as error:
                if not is_of_worker(error):
                    raise
        return _payload(self._read_again(worker, len(self.batches)))


def _payload(batches: Batches) -> Any:
    return batches.payload if isinstance(batches, JoinedBatches) else batches


class TicketQueue:
    """Batches that readers have ready, shared with the chief's thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closed = False
        self.error: BaseException | None = None

    def close(self) -> None:
        """Ends the readers, when nobody takes batches any more."""
        self.is_closed = True
        if self.changed.acquire(blocking=False):
            self.changed.notify_all()
            self.changed.release()

    def take(
        self,
        readers: Sequence[Any],
        free: Callable[[], list[int]],
        while_waiting: Callable[[], None],
    ) -> Ticket | None:
        """Takes a reader's first ticket for a worker; see `WorkerIterator.take`."""
        while True:
            with self.changed:
                # A worker reads the shares of those that are not there, too: the fullest first.
                filled = sorted(readers, key=lambda reader: len(reader.tickets))
                ready = {r.tickets[0].home: r for r in filled if r.tickets}
                workers = free() if ready else []
                if workers:
                    # Else a slower worker has read more than it trains on.
                    worker = next((w for w in workers if w in ready), workers[0])
                    most = max(ready.values(), key=lambda reader: len(reader.tickets))
                    ticket = ready.get(worker, most).tickets.pop(0)
                    ticket.worker = worker
                    self.changed.notify_all()
                    return ticket
                if self.error is not None:
                    raise self.error
                if not ready and all(reader.is_done for reader in readers):
                    return None
                # Nothing here says that a worker has become free.
                self.changed.wait(_FREE_SECONDS if ready else RETRY_SECONDS)
            while_waiting()
