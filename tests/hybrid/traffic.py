"""Bytes that a case sends, by what a strategy counts, and rows that a worker's batches have."""

import numpy as np
import tensorflow as tf


class Traffic:
    """Counts what a strategy sends from here on."""

    def __init__(self):
        self._before = self._now()

    @staticmethod
    def _now():
        communication = tf.distribute.get_strategy().communication
        found = {"own total": np.int64(communication.wire_bytes)}
        for one in communication.traffic():
            counted = one.logical_bytes, one.compressed_bytes, one.wire_bytes
            found[f"own {one.direction} of {one.path}"] = np.array(counted)
        return found

    def since(self):
        """Bytes by direction and path: as they are, compressed, sent. They differ by worker."""
        return {name: sent - self._before.get(name, 0) for name, sent in self._now().items()}


def shares_of(task, x, batch):
    """A worker's part of each batch, one of two."""
    parts = (np.array_split(x[i : i + batch], 2) for i in range(0, len(x), batch))
    return [part[int(task[-1])] for part in parts]


def rows_of(task, x, batch, epochs):
    """How many rows a worker looks up in training with ids."""
    return epochs * sum(len(np.unique(share)) for share in shares_of(task, x, batch))
