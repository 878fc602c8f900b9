"""Stages of layers, and the implementation half that makes variables on their devices."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base.threads import ThreadValue
from keras_psplus.keras_internals.keras_parts import global_state, layers
from keras_psplus.tf_internals import distribute_lib, one_device_strategy
from keras_psplus.tf_internals import framework_ops as ops

_given: ThreadValue[int] = ThreadValue()


@contextlib.contextmanager
def stage(number: int) -> Iterator[None]:
    """Context in which layers are made that belong to one stage of a pipeline.

    Under other strategies, and without one, it does nothing.

    Args:
        number: Number of the stage, from 0.

    Example:

    ```python
    strategy = keras_psplus.PipelineStrategy()
    with strategy.scope():
        with keras_psplus.stage(0):
            first = keras.layers.Dense(256, activation="relu")
        with keras_psplus.stage(1):
            second = keras.layers.Dense(10)
        model = keras.Sequential([first, second])
    ```

    Raises:
        ValueError: If the strategy has no such stage.
    """
    count = getattr(tf.distribute.get_strategy(), "num_stages", None)
    is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    if not is_number or (count is not None and number >= count):
        has = "" if count is None else f" This strategy has the stages 0 to {count - 1}."
        raise ValueError(f"`stage` takes the number of a stage.{has} Received: {number!r}")
    with _given.being(number):
        yield


class Stages:
    """The stages of one strategy, on the devices of one pipeline after the other.

    `devices` are those of the first pipeline's stages, `all_devices` those of all.
    """

    def __init__(self, devices: Sequence[str], pipelines: int = 1) -> None:
        self.all_devices, self.pipelines = list(devices), pipelines
        self.devices = self.all_devices[: len(devices) // pipelines]
        self._of_layers: weakref.WeakKeyDictionary[keras.Layer, int] = weakref.WeakKeyDictionary()

    def note_made(self, layer: keras.Layer) -> None:
        number = _given()
        if number is not None:
            self.put(layer, number)

    def put(self, layer: keras.Layer, number: int) -> None:
        self._of_layers[layer] = number

    def of(self, layer: keras.Layer) -> int | None:
        return self._of_layers.get(layer)

    def device(self, number: int, pipeline: int) -> str:
        return self.all_devices[pipeline * len(self.devices) + number]

    def others_of(self, number: int) -> tuple[str, ...]:
        return tuple(self.device(number, pipeline) for pipeline in range(1, self.pipelines))

    def pipeline_of(self, device: str) -> int | None:
        """The pipeline that a device belongs to; None if it is no stage's."""
        if device not in self.all_devices:
            return None
        return self.all_devices.index(device) // len(self.devices)

    def of_device(self, device: str) -> int:
        return self.all_devices.index(device) % len(self.devices)

    def of_scope(self) -> int | None:
        """Stage of the innermost layer that is creating variables and has a stage."""
        for entry in reversed(global_state.get_global_attribute("name_scope_stack") or ()):
            if isinstance(entry.caller, layers.Layer) and self.of(entry.caller) is not None:
                return self.of(entry.caller)
        return None


def host_of(device: str) -> str:
    """Name of the CPU of a device's machine, which has what a GPU has not."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "GPU":
        spec = spec.replace(device_type="CPU", device_index=0)
    return str(spec.to_string())


def is_in_layer() -> bool:
    scopes = global_state.get_global_attribute("name_scope_stack")
    return bool(scopes) and isinstance(scopes[-1].caller, layers.Layer)


class PipelineExtended(one_device_strategy.OneDeviceExtended):
    """Additional APIs of `PipelineStrategy`."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        stages: Stages,
        host: str,
        note_changed: Callable[[tf.Variable], None],
    ) -> None:
        super().__init__(strategy, host)
        self._stages, self._note_changed = stages, note_changed
        # The device on which a thread makes variables.
        self.making_on: ThreadValue[str] = ThreadValue()

    def has_made(self, variable: Any) -> bool:
        return variable is None or variable.device in self._stages.all_devices

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        beside = kwargs.pop("colocate_with", None)
        device = self.making_on() or getattr(beside, "device", None) or self._stages.devices[-1]
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
    in_step = tf.distribute.get_strategy() is strategy and tf.distribute.get_replica_context()
    scope = contextlib.nullcontext() if in_step else strategy.scope()
    with scope, strategy.extended.making_on.being(device):
        yield
