"""Halves of `HybridStrategy` with `shard=`: tables, and the rest of the optimizer in shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.engine import Call, answers
from keras_psplus.hybrid.engine import TableEngine
from keras_psplus.hybrid.extended import TableExtended
from keras_psplus.hybrid.tables.embeddings import is_table
from keras_psplus.sharding import sums
from keras_psplus.sharding.engine import ShardedEngine
from keras_psplus.sharding.extended import ShardedExtended
from keras_psplus.sharding.plan import OptimizerPlan

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

    from keras_psplus.engine import Gradients, Variables


class _Plan(OptimizerPlan):
    """Leaves tables, and their slots, to the servers."""

    def _is_remote(self, variable: keras.Variable) -> bool:
        return is_table(variable)


class ShardedHybridEngine(TableEngine, ShardedEngine):
    """Cuts what an optimizer keeps of the variables that are no tables."""

    def _make_plan(self, optimizer: Optimizer) -> OptimizerPlan:
        return _Plan(optimizer, self.strategy.extended.store.workers)

    @answers("initialize_with_initializer")
    def _initialize_with_initializer(self, call: Call) -> Any:
        # A slot that is being made in shares is that of no table.
        is_slot = self._place_of_slot is not None
        cls: type[TableEngine | ShardedEngine] = ShardedEngine if is_slot else TableEngine
        return cls._initialize_with_initializer(self, call)

    def _squares(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> list[Any]:
        places = self._placed(optimizer, variables)
        return sums.squares_of(grads, self._parts(grads, places), self._sum_over_parts)

    def _scaled(
        self, scale: tf.Tensor, optimizer: Optimizer, grads: Gradients, variables: Variables
    ) -> list[Any]:
        scaled = super()._scaled(scale, optimizer, grads, variables)
        return self._cut_if_dense(list(grads), scaled, self._placed(optimizer, variables))


class ShardedHybridExtended(TableExtended, ShardedExtended):
    """Additional APIs of `keras_psplus.HybridStrategy` with `shard=`."""
