"""Updates of dynamic tables by what workers' runs have left on the parameter servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.core.base.scalars import scalar_tensor
from keras_psplus.parameter_server.scheduling.closures import Closure
from keras_psplus.parameter_server.scheduling.workers import WorkerCalls
from keras_psplus.parameter_server.tracing import remote
from keras_psplus.parameter_server.transport.dynamic_table import PlacedTable
from keras_psplus.tables.local import outside
from keras_psplus.tables.rows.graphs import traced

_numbers = itertools.count(1)


class RowUpdates:
    """Functions of the chief that update tables.

    Args:
        tables: Those that a step keeps gradients for.

    Attributes:
        has_rest: Whether a run was lost, of which something may be kept.
    """

    def __init__(self, tables: Sequence[PlacedTable]) -> None:
        self._shards = [shard for table in tables for shard in table.shards]
        self._take: Any = outside(lambda: traced(self._take_all, tf.TensorSpec([], tf.int64)))
        self.has_rest = False

    def _take_all(self, number: tf.Tensor) -> tf.Tensor:
        for shard in self._shards:
            shard.take(number)
        return number

    def take(self, number: int) -> None:
        """Updates rows by what a run has left."""
        with tf.device(remote.CHIEF):
            remote.call(self._take, scalar_tensor(number, tf.int64))

    def forget_rest(self) -> None:
        """Forgets what lost runs have left, once no step is under way."""
        if self.has_rest:
            self.has_rest = False
            for shard in self._shards:
                shard.clear()


class RowClosure(Closure):
    """A step of one worker that also updates rows of dynamic tables."""

    def __init__(
        self,
        updates: RowUpdates,
        concrete: tf.types.experimental.ConcreteFunction,
        args: tuple[Any, ...],
        about: str,
        on_done: Callable[..., object],
    ) -> None:
        super().__init__(concrete, args, about, on_done)
        self._updates, self._number = updates, 0

    def run_on(self, calls: WorkerCalls) -> Any:
        # Another one each time that a worker is given it.
        self._number = next(_numbers)
        initial, *others = self._args
        numbered = tf.constant(np.append(initial.numpy(), self._number))
        try:
            return calls.call(self._concrete, numbered, *others)
        except BaseException:
            self._updates.has_rest = True
            raise

    def commit(self) -> None:
        self._updates.take(self._number)
