"""Admission of keys to one server's rows."""

from typing import Any

import tensorflow as tf

from keras_psplus.tables import policies
from keras_psplus.tables.expiry import Clock, Expiry
from keras_psplus.tables.keys import BLOCKS, blocks_of, mix, mixed, streams, uniform
from keras_psplus.tables.rows.graphs import places_of
from keras_psplus.tables.rows.key_rows import FREQUENCY, KeyRows

_INT = tf.int32
_PROBES = 4


class Admission:
    """Admits every key.

    Args:
        config: Configuration of a policy, or None.
        name: Name of the table, for messages.
        clock: `Clock` of the table.
        expiry: `Expiry` of the table.

    Attributes:
        candidates: `KeyRows` of keys that have no row yet, or None.
        filter: uint8 variable of a Bloom filter, or None.
        blocks: Number of this server's blocks of keys, each of which has a part of it.
    """

    candidates: KeyRows | None = None
    filter: tf.Variable | None = None
    blocks = 0

    def __init__(self, config: dict[str, Any], name: str, clock: Clock, expiry: Expiry) -> None:
        self._config, self._clock, self._expiry = config, clock, expiry

    def admit(self, keys: tf.Tensor, hashes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes an update of keys without a row.

        Args:
            keys: int64 vector of distinct keys.
            hashes: Their hashes.

        Returns:
            Which of them get a row, and the int32 number of updates that they were in.
        """
        return tf.ones_like(keys, tf.bool), tf.ones_like(keys, _INT)


class _Counting(Admission):
    candidates: KeyRows

    def __init__(self, config: dict[str, Any], name: str, clock: Clock, expiry: Expiry) -> None:
        super().__init__(config, name, clock, expiry)
        self.candidates = KeyRows(f"{name}, candidates", lambda: clock.step() + 1)

    def admit(self, keys: tf.Tensor, hashes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = self._expiry.find(self.candidates, hashes)
        known = rows >= 0
        before = self.candidates.meta(tf.maximum(rows, 0))[:, FREQUENCY]
        counts = tf.where(known, before, 0) + 1
        admitted = counts >= self._config["n"]
        self.candidates.remove(tf.gather(rows, places_of(known & admitted)))
        wait = places_of(known & ~admitted)
        waiting = tf.gather(rows, wait)
        self.candidates.keep(waiting)
        now, seconds = self._clock.step() + 1, tf.cast(tf.timestamp(), _INT)
        self.candidates.note(waiting, tf.gather(counts, wait), now, seconds)
        new = tf.gather(keys, places_of(~known & ~admitted))
        meta = tf.stack([tf.constant(1), now, seconds])
        self.candidates.add(new, tf.tile(meta[tf.newaxis], [tf.size(new), 1]))
        self._expiry.sweep(self.candidates, "candidates")
        return admitted, counts


class _Filtering(Admission):
    filter: tf.Variable

    def __init__(
        self,
        config: dict[str, Any],
        name: str,
        clock: Clock,
        expiry: Expiry,
        server: int,
        servers: int,
    ) -> None:
        super().__init__(config, name, clock, expiry)
        self._servers, self._size = servers, counters_of_block(config)
        self.blocks = (BLOCKS - server + servers - 1) // servers
        with tf.init_scope():
            self.filter = tf.Variable(
                tf.zeros([self.blocks * self._size], tf.uint8), trainable=False
            )

    def admit(self, keys: tf.Tensor, hashes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        bits = tf.bitcast(hashes, tf.uint64)
        probes = streams(keys, 1, _PROBES) % tf.constant(self._size, tf.uint64)
        start = tf.cast(blocks_of(bits) // self._servers, tf.int64) * self._size
        places = start[:, tf.newaxis] + tf.cast(probes, tf.int64)
        counters = tf.cast(self.filter.sparse_read(places), _INT)
        counts = tf.minimum(tf.reduce_min(counters, 1) + 1, 255)
        raised = tf.tile(tf.cast(counts, tf.uint8)[:, tf.newaxis], [1, _PROBES])
        tf.raw_ops.ResourceScatterMax(resource=self.filter.handle, indices=places, updates=raised)
        return counts >= self._config["n"], counts


class _Drawing(Admission):
    def admit(self, keys: tf.Tensor, hashes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        step = mix(tf.cast(self._clock.steps.read_value(), tf.uint64))
        bits = mix(mixed(keys) + step)
        drawn = uniform(tf.bitcast(bits, tf.uint32)[:, 0])
        return drawn < self._config["p"], tf.ones_like(keys, _INT)


def counters_of_block(config: dict[str, Any]) -> int:
    """Bytes of a Bloom filter for each block of keys, of a `Bloom`'s configuration."""
    return max(1, config["bits"] // 8 // BLOCKS)


def make(
    config: dict[str, Any] | None,
    name: str,
    clock: Clock,
    expiry: Expiry,
    server: int,
    servers: int,
) -> Admission:
    """Makes the `Admission` of a configuration."""
    kind = None if config is None else config["kind"]
    if config is None:
        return Admission({}, name, clock, expiry)
    if kind == policies.Count.__name__:
        return _Counting(config, name, clock, expiry)
    if kind == policies.Bloom.__name__:
        return _Filtering(config, name, clock, expiry, server, servers)
    return _Drawing(config, name, clock, expiry)
