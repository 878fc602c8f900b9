"""Engine of `MultiWorkerMirroredStrategy` where one replica trains alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.data import sharding
from keras_psplus.all_reduce.step import broadcast, replica_functions, row_reads, single_steps
from keras_psplus.core.data import data_seeds, epochs
from keras_psplus.core.distributed_engine import symbolic_batch
from keras_psplus.core.strategy_engine import StrategyEngine
from keras_psplus.engine import Call, answers


class OneReplicaEngine(StrategyEngine):
    """Engine of one replica that trains alone: backups that survive a kill."""

    has_weights_in_memory = True

    @property
    def compiles_by_default(self) -> bool:
        return "GPU" in self.strategy.extended.worker_devices[0]

    @answers("compile")
    def _compile(self, call: Call) -> Any:
        result = call.proceed()
        self.resolve_auto_jit(call.owner, call.arguments.get("jit_compile", "auto"))
        return result

    # In a cluster of one, data come in the order in which more workers would read them, so that a
    # job can go on with another number of them.

    @answers("make_iterator")
    def _make_iterator(self, call: Call) -> None:
        # Batches are the data's own: TensorFlow's distributed datasets would make an iterator of
        # several devices for each epoch, which takes 40 ms, and ask it for each step.
        iterator = epochs.make_without_data(call)
        if self.strategy.task is None:
            iterator._distributed_dataset = iterator.data_adapter.get_tf_dataset()
            return
        seed = self.progress.data_seed(data_seeds.draw())
        iterator._distributed_dataset = sharding.of_one_replica(iterator.data_adapter, seed)
        self.progress.note_data_seed(seed)

    def build(self, call: Call) -> None:
        iterator, data_batch = call.get("iterator"), call.get("data_batch")
        if iterator is not None:
            # Keras would draw a batch to see its shapes, and shuffles that change their order from
            # pass to pass would be one pass further than in one process.
            data_batch = symbolic_batch(iterator._distributed_dataset.element_spec)
        call.proceed(iterator=None, data_batch=data_batch)

    @answers("make_function")
    def _make_function(self, call: Call) -> Callable[..., Any]:
        function = call.proceed(step_function=single_steps.after_data(call.get("step_function")))
        return replica_functions.in_progress(self.strategy.progress, call, function)

    def broadcast_restored(self, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        broadcast.from_chief(self.strategy, variables)

    def reads_rows(self, variable: keras.Variable) -> bool:
        return row_reads.can_read(variable)
