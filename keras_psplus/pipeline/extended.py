"""`PipelineStrategy`'s implementation half: one replica, whose variables are on many devices."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import distribute_lib, one_device_strategy
from keras_psplus.tf_internals import framework_ops as ops


class PipelineExtended(one_device_strategy.OneDeviceExtended):
    """Additional APIs of `PipelineStrategy`.

    Args:
        devices: Names of the devices of the first pipeline's stages.
        all_devices: Names of the devices of all pipelines' stages.
        host: Name of the chief's device, which reads the data.
        note_changed: Function of a variable that is called before it is updated.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: list[str],
        all_devices: list[str],
        host: str,
        note_changed: Callable[[tf.Variable], None],
    ) -> None:
        super().__init__(strategy, host)
        self._devices, self._all_devices = list(devices), list(all_devices)
        self._note_changed = note_changed
        self._making_on: contextvars.ContextVar[str | None]
        self._making_on = contextvars.ContextVar("making_on", default=None)

    def has_made(self, variable: Any) -> bool:
        return variable is None or variable.device in self._all_devices

    @contextlib.contextmanager
    def making_on(self, device: str) -> Iterator[None]:
        token = self._making_on.set(device)
        try:
            yield
        finally:
            self._making_on.reset(token)

    @property
    def device_of_making(self) -> str | None:
        return self._making_on.get()

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        beside = kwargs.pop("colocate_with", None)
        device = self._making_on.get() or getattr(beside, "device", None) or self._devices[-1]
        with ops.colocate_with(None, ignore_existing=True), ops.device(device):
            return next_creator(**kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        with distribute_lib.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=0):
            return fn(*args, **(kwargs or {}))

    def _update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Any:
        self._note_changed(var)
        with ops.device(var.device), distribute_lib.UpdateContext(var.device):
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return value


@contextlib.contextmanager
def making_on(strategy: tf.distribute.Strategy, device: str) -> Iterator[None]:
    """Context in which variables of a `PipelineStrategy` are made on a device."""
    in_step = tf.distribute.get_strategy() is strategy and tf.distribute.get_replica_context()
    scope = contextlib.nullcontext() if in_step else strategy.scope()
    with scope, strategy.extended.making_on(device):
        yield
