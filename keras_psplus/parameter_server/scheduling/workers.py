"""A worker as the chief sees it: its resources, and calls of functions on it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.parameter_server.tracing import remote
from keras_psplus.tf_internals import context, coordinator_context, executor


class RemoteWorker:
    """A worker, with the resources that functions find on it."""

    def __init__(self, index: int) -> None:
        # The name is TensorFlow's, for `experimental_get_current_worker_index`.
        self.index = self.worker_index = index
        self.name = f"worker-{index}"
        self.device_name = f"/job:worker/replica:0/task:{index}"
        self._lock = threading.Lock()
        self.forget()

    def resource(self, owner: Any, make: Callable[[], Any]) -> Any:
        """A resource of this worker, made if missing, and deleted with its owner."""
        with self._lock:
            if owner not in self._resources:
                self._resources[owner] = make()
            return self._resources[owner]

    def forget(self) -> None:
        """Notes that the worker has lost its resources."""
        self._resources: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class WorkerCalls:
    """Calls of functions on a worker, one after another, with what may cancel them."""

    def __init__(self, worker: RemoteWorker) -> None:
        self.worker = worker
        self.cancellation: Any = None
        self._executor = executor.new_executor(enable_async=False)

    def clear_error(self) -> None:
        """Forgets the error of a call, which TensorFlow would raise once more."""
        self._executor.clear_error()

    def call(self, concrete: tf.types.experimental.ConcreteFunction, *args: Any) -> Any:
        """Calls a function on the worker; returns its outputs, which stay there."""
        with (
            tf.device(self.worker.device_name),
            context.executor_scope(self._executor),
            coordinator_context.with_dispatch_context(self.worker),
        ):
            flat = iter(remote.call(concrete, *args, cancellation=self.cancellation))
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(flat),
            concrete.structured_outputs,
            expand_composites=True,
        )
