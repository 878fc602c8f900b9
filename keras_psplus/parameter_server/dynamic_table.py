"""Dynamic tables on parameter servers, which run TensorFlow and none of this library's code.

    worker   keys ─► rows, of each key's server ─► loss ─► gradients ─► kept on the servers
    chief    once the step counts ─► update of the rows, whole, on each server

Rows change in functions of the chief alone. In `mode="sync"` these take the sums of a step, else
what one run of a worker has left, under a number that no other run has. A worker that is lost
leaves what nobody takes: each update counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.parameter_server import traffic
from keras_psplus.parameter_server.pulls import ShardParts, as_read
from keras_psplus.parameter_server.worker_function import current_trace
from keras_psplus.tables.chunks import as_it_is, traced
from keras_psplus.tables.keys import owners_of
from keras_psplus.tables.local import LocalTable, outside
from keras_psplus.tables.store import RowStore

_LONG, _FLOAT = tf.int64, tf.float32
# Keys, gradient, numbers and iterations of an update.
_UPDATE = _LONG, _FLOAT, _FLOAT, _LONG


class Servers(NamedTuple):
    devices: Sequence[str]
    prefix: str
    settle: Callable[[], object]


class ServerRows:
    """Rows of one server, to which gradients are sent as to a shard."""

    def __init__(self, store: RowStore, device: str, name: str) -> None:
        self._store, self.device, self._name = store, device, name
        self.dtype, self.shape = _FLOAT, tf.TensorShape([0, store.dim])
        with tf.device(device):
            self._lock = tf.CriticalSection(name=f"{name}/lock")
        self._functions: dict[str, Any] = {}

    def forget_optimizer(self) -> None:
        self._functions.pop("update", None)

    def _call(self, name: str, function: Callable[..., Any], *args: tf.Tensor) -> tf.Tensor:
        """Calls a function that the server executes alone, once its arguments are there."""
        if name not in self._functions:
            specs = [tf.TensorSpec([None] * len(arg.shape), arg.dtype) for arg in args]

            def locked(*args: tf.Tensor) -> tf.Tensor:
                return self._lock.execute(lambda: function(*args))

            self._functions[name] = outside(lambda: traced(locked, *specs))
        with tf.device(self.device), as_it_is():
            return self._functions[name](*args)

    def lookup(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        """Rows as they are stored, in which type they are sent."""
        name, stored = "lookup in training" if trains else "lookup", self._store.weights.stored
        return self._call(
            name, lambda keys: tf.cast(self._store.lookup(keys, trains), stored), keys
        )

    def update(
        self, keys: tf.Tensor, gradient: tf.Tensor, numbers: tf.Tensor, iterations: tf.Tensor
    ) -> None:
        def update(
            keys: tf.Tensor, gradient: tf.Tensor, numbers: tf.Tensor, iterations: tf.Tensor
        ) -> tf.Tensor:
            done = self._store.apply(keys, gradient, numbers[0], numbers[1:], iterations)
            with tf.control_dependencies([done]):
                return tf.identity(iterations)

        self._call("update", update, keys, gradient, numbers, iterations)

    # Updates that are kept, by numbers.

    def keep(self, update: Sequence[tf.Tensor], number: tf.Tensor) -> None:
        """Keeps the arguments of an update, which have not come yet, for `take`."""
        with tf.device(self.device):
            tf.raw_ops.MapStage(
                key=number,
                indices=tf.range(len(_UPDATE)),
                values=list(update),
                dtypes=_UPDATE,
                shared_name=self._name,
            )

    def take(self, number: tf.Tensor) -> None:
        shapes: list[list[int | None]] = [[None], [None, self.shape[1]], [None], []]
        with tf.device(self.device):
            kept = tf.raw_ops.MapUnstage(
                key=number, indices=tf.range(len(_UPDATE)), dtypes=_UPDATE, shared_name=self._name
            )
            self.update(*(tf.ensure_shape(one, shape) for one, shape in zip(kept, shapes)))

    def clear(self) -> None:
        with tf.device(self.device):
            tf.raw_ops.MapClear(dtypes=_UPDATE, shared_name=self._name)


class PlacedTable(LocalTable):
    """Value of a `KeyedVariable` whose rows lie on parameter servers."""

    def __init__(
        self,
        spec: dict[str, Any],
        trainable: bool,
        of: PlacedTable | None = None,
        slot: int = 0,
        servers: Servers | None = None,
    ) -> None:
        given = servers if of is None else of._servers
        assert given is not None
        self._servers: Servers = given
        self.devices = given.devices
        self.shards: list[ServerRows] = [] if of is None else of.shards
        # Keys are the same on all servers.
        self.offsets = [0] * len(self.devices)
        super().__init__(spec, trainable, of, slot)

    def _make_stores(self) -> None:
        super()._make_stores()
        name = f"{self._servers.prefix}/{self._unique_id}"
        self.shards += [ServerRows(*one, name) for one in zip(self.stores, self.devices)]

    def _parts(self) -> list[Any]:
        self._servers.settle()
        return super()._parts()

    def set_optimizer(self, optimizer: Any, weight_decay: float | None) -> None:
        if self.optimizer is not optimizer:
            for shard in self.shards:
                shard.forget_optimizer()
        super().set_optimizer(optimizer, weight_decay)

    def _lookup(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        count = len(self.shards)
        owners, key = owners_of(keys, count), (self.spec["name"], "pull", None)
        places = tf.dynamic_partition(tf.range(tf.size(keys)), owners, count)
        parts = tf.dynamic_partition(keys, owners, count)
        rows = [shard.lookup(part, trains) for shard, part in zip(self.shards, parts)]
        sent = tf.size(keys, _LONG) * (keys.dtype.size + rows[0].dtype.size * self.spec["dim"])
        traffic.count(key, sent, sent)
        rows = tf.ensure_shape(tf.dynamic_stitch(places, rows), [None, self.spec["dim"]])
        return as_read(self, tf.cast(rows, _FLOAT))

    def split(self, gradient: Any) -> list[tf.IndexedSlices]:
        if isinstance(gradient, ShardParts):
            return list(gradient)
        owners = owners_of(gradient.indices, len(self.shards))
        keys, values = (
            tf.dynamic_partition(of, owners, len(self.shards))
            for of in (gradient.indices, gradient.values)
        )
        return [tf.IndexedSlices(v, k, gradient.dense_shape) for v, k in zip(values, keys)]

    def _apply(self, gradient: Any, numbers: tf.Tensor, iterations: tf.Tensor) -> None:
        for shard, part in zip(self.shards, self.split(gradient)):
            shard.update(part.indices, tf.cast(part.values, _FLOAT), numbers, iterations)

    def keep(self, optimizer: Any, gradient: Any) -> None:
        trace = current_trace()
        # A step that is traced to make its variables runs nowhere.
        if trace is not None:
            number = trace.keep(self, self.spec["name"])
            numbers = self.numbers(optimizer, optimizer.learning_rate)
            for shard, part in zip(self.shards, self.split(gradient)):
                values = tf.cast(part.values, _FLOAT)
                shard.keep([part.indices, values, *numbers], number)


def keep(
    optimizer: Any, pairs: Sequence[tuple[Gradient | ShardParts | None, Any]]
) -> list[tuple[Any, Any]]:
    """Keeps the gradients of tables on their servers; returns the other pairs."""
    for gradient, variable in pairs:
        if isinstance(variable, PlacedTable) and gradient is not None:
            variable.keep(optimizer, gradient)
    return [pair for pair in pairs if not isinstance(pair[1], PlacedTable)]
