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


def rows_of(task, x, batch):
    """How many rows one of two workers looks up in an epoch, having a part of each batch."""
    parts = (np.array_split(x[i : i + batch], 2) for i in range(0, len(x), batch))
    return sum(len(np.unique(part[int(task[-1])])) for part in parts)
