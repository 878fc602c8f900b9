"""Admission of keys to one server's rows, and expiry of rows."""

from typing import Any

import tensorflow as tf

from keras_psplus.tables import policies
from keras_psplus.tables.chunks import MOST_ROWS, ChunkedRows, places_of
from keras_psplus.tables.index import FREQUENCY, LAST, SEEN, KeyRows
from keras_psplus.tables.keys import BLOCKS, blocks_of, mix, mixed, streams, uniform

# Expiry of rows, in a bounded time at each step.
#
# A row that was not used for so many steps counts as gone at once, for all who ask; its memory is
# free when the sweep comes by. So a table does not depend on how its rows are laid out.


_INT = tf.int32
_LONG = tf.int64
# Rows that a sweep looks at in one step, and among which it finds the first to expire.
_SWEPT, _WINDOW = 1 << 13, 1 << 16
_SECONDS_OF_DAY = 86_400


class Clock:
    """Number of updates of a table, and the time of the last one."""

    def __init__(self) -> None:
        with tf.init_scope():
            self.steps = tf.Variable(0, dtype=_LONG, trainable=False)
            self.seconds = tf.Variable(0, dtype=_INT, trainable=False)

    def step(self) -> tf.Tensor:
        """int32 number of updates so far."""
        return tf.cast(self.steps.read_value(), _INT)

    def tick(self) -> None:
        self.steps.assign_add(1, read_value=False)
        self.seconds.assign(tf.cast(tf.timestamp(), _INT), read_value=False)


class Expiry:
    """Policies of expiry of one server's rows.

    Args:
        configs: Configurations of the policies.
    """

    def __init__(
        self, configs: list[dict[str, Any]], clock: Clock, servers: int, server: int
    ) -> None:
        self._clock = clock
        self._unused = policies.find(configs, policies.Unused)
        self._norm = policies.find(configs, policies.Norm)
        capacity = policies.find(configs, policies.Capacity)
        self._policy, self._share = "lru", None
        if capacity is not None:
            self._policy = capacity["policy"]
            self._share = min((capacity["rows"] - server + servers - 1) // servers, MOST_ROWS)
        with tf.init_scope():
            self._cursors = {
                what: tf.Variable(0, dtype=_INT, trainable=False)
                for what in ("rows", "candidates", "capacity")
            }

    def living(self, key_rows: KeyRows, rows: tf.Tensor) -> tf.Tensor:
        """The same row numbers, with -1 for rows that were not used for too long."""
        if self._unused is None:
            return rows
        safe = tf.maximum(rows, 0)
        return tf.where(self._is_dead(key_rows, safe), -1, rows)

    def _is_dead(
        self, key_rows: KeyRows, rows: tf.Tensor, at: tuple[tf.Tensor, tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Whether rows were not used for too long, now or at another time."""
        if self._unused is None:
            return tf.zeros_like(rows, tf.bool)
        if self._unused["steps"] is not None:
            step = self._clock.step() if at is None else at[0]
            return step - key_rows.meta(rows)[:, LAST] >= self._unused["steps"]
        most = max(1, int(self._unused["days"] * _SECONDS_OF_DAY))
        seconds = self._clock.seconds.read_value() if at is None else at[1]
        return seconds - key_rows.meta(rows)[:, SEEN] >= most

    def changed(
        self, key_rows: KeyRows, rows: tf.Tensor, step: tf.Tensor, seconds: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows that changed after a step and a time.

        Returns:
            Two masks: rows that were updated and live, and those that have died since.
        """
        has_key, dead = key_rows.have_key(rows), self._is_dead(key_rows, rows)
        updated = tf.logical_and(key_rows.meta(rows)[:, LAST] > step, tf.logical_not(dead))
        died = tf.logical_and(dead, ~self._is_dead(key_rows, rows, (step, seconds)))
        return tf.logical_and(has_key, updated), tf.logical_and(has_key, died)

    def find(self, key_rows: KeyRows, hashes: tf.Tensor) -> tf.Tensor:
        """Row numbers of keys for an update; keys that come too late lose theirs."""
        rows = key_rows.index.find(hashes)
        if self._unused is None:
            return rows
        living = self.living(key_rows, rows)
        late = tf.gather(rows, places_of(living < rows))
        key_rows.remove(late)
        return living

    def after_update(self, key_rows: KeyRows, rows: tf.Tensor, weights: ChunkedRows) -> None:
        """Removes rows that an update has made too small, and rows above the capacity."""
        if self._norm is not None:
            squares = tf.reduce_sum(tf.square(weights.sparse_read(rows)), 1)
            small = tf.gather(rows, places_of(squares < self._norm["below"] ** 2))
            key_rows.remove(small)
        if self._share is not None:
            over = key_rows.count() - self._share
            tf.cond(over > 0, lambda: self._remove_first(key_rows, over), lambda: 0)

    def sweep(self, key_rows: KeyRows, what: str) -> None:
        """Removes some of the rows that were not used for too long."""
        if self._unused is None:
            return
        rows = self._window(key_rows, what, _SWEPT)
        dead = places_of(tf.logical_and(key_rows.have_key(rows), self._is_dead(key_rows, rows)))
        key_rows.remove(tf.gather(rows, dead))

    def _remove_first(self, key_rows: KeyRows, over: tf.Tensor) -> int:
        assert self._share is not None
        # A small share is looked at whole, with the rows that this step has added.
        rows = self._window(key_rows, "capacity", MOST_ROWS if self._share <= _WINDOW else _WINDOW)
        rows = tf.gather(rows, places_of(key_rows.have_key(rows)))
        keys, meta = key_rows.keys(rows), key_rows.meta(rows)
        is_new = tf.cast(meta[:, LAST] > self._clock.step(), _INT)
        # The last counts most. Among equals, the order of the keys' hashes.
        criteria = [tf.bitcast(mixed(keys), _LONG), meta[:, LAST]]
        if self._policy == "lfu":
            # By the last use, the dead are the first and a step's own rows the last already.
            lives = tf.logical_not(self._is_dead(key_rows, rows))
            criteria += [meta[:, FREQUENCY], tf.cast(lives, _INT) + is_new]
        order = tf.range(tf.size(rows))
        for criterion in criteria:
            order = tf.gather(order, tf.argsort(tf.gather(criterion, order), stable=True))
        if self._share > _WINDOW:
            # Rows of this step stay, as there are older ones elsewhere.
            over = tf.minimum(over, tf.size(rows) - tf.reduce_sum(is_new))
        key_rows.remove(tf.gather(rows, order[:over]))
        return 0

    def _window(self, key_rows: KeyRows, what: str, most: int) -> tf.Tensor:
        """The next rows that a sweep looks at: behind the last, the first come again."""
        cursor, end = self._cursors[what], key_rows.next.read_value()
        first, count = cursor.read_value(), tf.minimum(most, end)
        cursor.assign(tf.math.floormod(first + count, tf.maximum(end, 1)), read_value=False)
        return tf.math.floormod(first + tf.range(count), tf.maximum(end, 1))


# Admission of keys to one server's rows.


_PROBES = 4


class Admission:
    """Admits every key.

    Args:
        config: Configuration of a policy, or None.

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
    kind = None if config is None else config["kind"]
    if config is None:
        return Admission({}, name, clock, expiry)
    if kind == policies.Count.__name__:
        return _Counting(config, name, clock, expiry)
    if kind == policies.Bloom.__name__:
        return _Filtering(config, name, clock, expiry, server, servers)
    return _Drawing(config, name, clock, expiry)
