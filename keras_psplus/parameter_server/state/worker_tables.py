"""Lookup tables of a script, of which each worker has a copy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import coordinator_context, load_context, ps_values
from keras_psplus.tf_internals import framework_ops as ops


class WorkerTable(ps_values.DistributedTable):
    """A table whose copy on a worker is made when the worker first needs it.

    In a loop of the script's own, TensorFlow's `ClusterCoordinator` makes the copies.
    """

    def __init__(self, strategy: tf.distribute.Strategy, make: Callable[[], Any]) -> None:
        self._strategy = strategy
        super().__init__(strategy, make)

    def _maybe_build_distributed_table(self) -> None:
        self._coordinator = self._strategy._cluster_coordinator
        if self._coordinator is not None:
            super()._maybe_build_distributed_table()

    def resource_handle_call_time_value(self) -> tuple[Callable[[], tf.Tensor], tf.TensorSpec]:
        """A function that a step's call finds the worker's table by, and its specification."""
        of_coordinator, spec = super().resource_handle_call_time_value()

        def handle() -> tf.Tensor:
            dispatch = coordinator_context.get_current_dispatch_context()
            find = getattr(dispatch and dispatch.worker, "resource", None)
            if find is None:
                return of_coordinator()
            return find(self, self._wrapped_creator).resource_handle

        return handle, spec


def creator_scope(strategy: tf.distribute.Strategy) -> AbstractContextManager[None]:
    """Context in which a script's static tables are those of all workers."""

    def create(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if load_context.in_load_context():
            # Functions of a SavedModel fill it, here only.
            return make(*args, **kwargs)
        return WorkerTable(strategy, lambda: make(*args, **kwargs))

    return ops.resource_creator_scope("StaticHashTable", create)
