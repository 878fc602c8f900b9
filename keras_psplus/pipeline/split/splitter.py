"""Splitter of models into stages, and their variables, which are made on their stage.

A model's first values must not come together on the chief, which may have less memory than all
stages. So a variable whose stage is not known yet is not made: Keras itself knows variables without
a value. It is made when it is given a value or read, on the stage that has the least.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core import plan as plan_request
from keras_psplus.engine import Engine
from keras_psplus.keras_internals.keras_parts import TensorFlowTrainer, unpack_x_y_sample_weight
from keras_psplus.log import logger
from keras_psplus.pipeline.base import microbatches, schedule
from keras_psplus.pipeline.base.stages import Stages, is_in_layer
from keras_psplus.pipeline.extended import making_on
from keras_psplus.pipeline.replicas import Copies
from keras_psplus.pipeline.split import costs, measure, partition, plan
from keras_psplus.pipeline.split.costs import LayerCost
from keras_psplus.pipeline.split.measure import Times
from keras_psplus.pipeline.step import train_step


class Variables:
    """Makes and moves the variables of one strategy."""

    def __init__(self, strategy: tf.distribute.Strategy, stages: Stages, copies: Copies) -> None:
        self._strategy: Callable[[], tf.distribute.Strategy] = weakref.ref(strategy)
        self._stages, self._copies = stages, copies
        self._bytes = [0] * len(stages.devices)
        # By ids, as Keras's variables have no hash: variables with their stages, and slots with the
        # variables that they belong to.
        self._placed: dict[int, tuple[Any, int]] = {}
        self._slots: dict[int, tuple[Any, Any]] = {}

    def initialize(self, variable: keras.Variable, initializer: Any) -> None:
        """Makes a variable that a layer or something else makes, or leaves it for later."""
        device = self._strategy().extended.device_of_making
        number = self._stages.of_scope()
        if device is not None:
            self._make(variable, initializer, self._stages.of_device(device), device)
        elif number is not None:
            self._make(variable, initializer, number)
        elif not is_in_layer():
            self._make(variable, initializer, len(self._bytes) - 1)
        elif variable._initializer is not None:
            # Keras forgets the initializer of a variable that it had deferred.
            self._make(variable, initializer, self._emptiest())
        else:
            variable._value, variable._initializer = None, initializer

    def beside(self, variable: keras.Variable) -> AbstractContextManager[None]:
        """Context in which variables are made where another one is."""
        self.ensure(variable)
        return making_on(self._strategy(), variable._value.device)

    def ensure(self, variable: keras.Variable) -> None:
        """Makes a variable that is not made yet."""
        if variable._value is None and variable._initializer is not None:
            self.put(variable, self._emptiest())

    def put(self, variable: keras.Variable, number: int, pipeline: int = 0) -> None:
        """Makes a variable on a pipeline's stage, or moves it there."""
        device = self._stages.device(number, pipeline)
        if variable._value is None and variable._initializer is not None:
            initializer, variable._initializer = variable._initializer, None
            self._make(variable, initializer, number, device)
        elif isinstance(variable._value, tf.Variable) and variable._value.device != device:
            old = variable._value
            with making_on(self._strategy(), device), tf.name_scope(""):
                variable._value = tf.Variable(
                    _on(device, old.read_value),
                    trainable=old.trainable,
                    name=old.name.removesuffix(":0"),
                )
            # Optimizers know a variable by this.
            variable._value._unique_id = old._unique_id

    def place(self, variable: keras.Variable, number: int) -> None:
        """Puts a variable on a stage for good: traced functions know it there."""
        if self.stage_of_placed(variable) is None:
            pipeline = self._copies.pipeline_for(variable, number)
            self.put(variable, number, pipeline)
            self._placed[id(variable)] = weakref.ref(variable), number
            self._copies.make(variable, number, pipeline)

    def stage_of_placed(self, variable: keras.Variable) -> int | None:
        known, number = self._placed.get(id(variable), (lambda: None, None))
        return number if known() is variable else None

    def note_slot(self, slot: keras.Variable, reference: keras.Variable) -> None:
        """Notes a slot of an optimizer, which follows its variable."""
        self._slots[id(slot)] = weakref.ref(slot), weakref.ref(reference)

    def place_slots(self) -> None:
        """Puts slots where their variables were placed since."""
        for key, (slot, reference) in list(self._slots.items()):
            if slot() is None or reference() is None:
                del self._slots[key]
                continue
            number = self.stage_of_placed(reference())
            if number is not None and self.stage_of_placed(slot()) is None:
                pipeline = self._copies.pipeline_of(reference())
                self.put(slot(), number, pipeline)
                self._placed[key] = slot, number

    def _make(
        self,
        variable: keras.Variable,
        initializer: Callable[..., Any],
        number: int,
        device: str | None = None,
    ) -> None:
        device, trainable = device or self._stages.devices[number], variable._trainable
        # It may be frozen before it is made, and thawed after.
        variable._trainable = getattr(variable, "_is_made_to_train", trainable)
        # By its name, an optimizer may leave it out of weight decay: it is that of one process.
        scope, slash, _ = variable.path.rpartition("/")
        try:
            with making_on(self._strategy(), device), tf.name_scope(scope + slash):
                variable._initialize(
                    _on(device, lambda: initializer(variable._shape, dtype=variable._dtype))
                )
        finally:
            variable._trainable = trainable
        self._bytes[number] += variable._value.shape.num_elements() * variable._value.dtype.size

    def _emptiest(self) -> int:
        return self._bytes.index(min(self._bytes))


def _on(device: str, function: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
    """A function without arguments that runs on a device, also where TensorFlow clears devices."""

    def on_device() -> tf.Tensor:
        with tf.device(device):
            return function()

    return on_device


# Rows of a micro-batch where data do not tell.
_ROWS = 32


def _own_step(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """A model's train or predict step, if it is not Keras's.

    Its `call` may take something else than the batch.
    """
    is_own = getattr(type(model), name) is not getattr(TensorFlowTrainer, name)
    return model._autoconvert_optionals(getattr(model, name)) if is_own else None


class Splitter:
    """Splits the models of one strategy.

    Args:
        patterns: For each stage, a list of patterns of layers' names; None for none.
        measures: Whether layers are measured, or their floating-point operations counted.
    """

    def __init__(
        self,
        stages: Stages,
        variables: Variables,
        patterns: list[list[str]] | None,
        measures: bool = True,
    ) -> None:
        self._stages, self._variables = stages, variables
        self._patterns, self._measures = patterns, measures
        self._plans: weakref.WeakKeyDictionary[keras.Model, plan.Plan] = weakref.WeakKeyDictionary()
        # Models whose outputs have masks.
        self._masked: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    def has_masks(self, model: keras.Model) -> bool:
        return model in self._masked

    def split(
        self,
        engine: Engine,
        model: keras.Model,
        batch_spec: Any,
        trains: bool,
        batch_rows: int | None = None,
    ) -> None:
        """Puts a model's layers and variables on stages, once.

        Args:
            trains: Whether it is to be trained, for which no stage may be without layers.
            batch_rows: Rows of a batch, where `batch_spec` does not tell.

        Raises:
            ValueError: If there are fewer layers than stages, or patterns do not fit.
        """
        if model in self._plans:
            return
        strategy = engine.strategy
        x, _, _ = unpack_x_y_sample_weight(batch_spec)
        step = _own_step(model, "train_step" if trains else "predict_step")
        with strategy.scope():
            found, has_masks, applied = costs.of_layers(
                engine, model, x if step is None else batch_spec, step
            )
        if has_masks:
            self._masked.add(model)
        for cost in found:
            # Of another model that was split before, perhaps inside of one of its layers.
            placed = [self._variables.stage_of_placed(v) for v in cost.layer.variables]
            known = next((number for number in placed if number is not None), None)
            if known is not None:
                self._stages.put(cost.layer, known)
        split = self._split(strategy, model, batch_rows or microbatches.rows_of_spec(x))
        times = self._measured(found, split)
        are_milliseconds = times is not None
        times = times or measure.counted(found)
        numbers = self._stages_of(found, times, split, trains)
        made = plan.make(model.name, found, numbers, times, are_milliseconds, split)
        if (request := plan_request.read()) is not None:
            request.answer({"text": str(made), "plan": made.as_dict()})
        for cost, number in zip(found, numbers):
            self._stages.put(cost.layer, number)
        self._put_variables(model)
        with strategy.scope():
            for optimizer, variables in applied:
                if not optimizer.built:
                    optimizer.build(variables)
        self._plans[model] = strategy.plan = made
        logger.info("%s", made)

    def _split(
        self, strategy: tf.distribute.Strategy, model: keras.Model, batch_rows: int | None
    ) -> plan.Split:
        stages, name = self._stages, strategy.schedule
        batch_rows = batch_rows or _ROWS * strategy.microbatches
        if name == "1f1b" and (model in self._masked or train_step.why_not_divided(model)):
            name = "gpipe"
        # Each pipeline has its part of the batch.
        batch_rows = math.ceil(batch_rows / stages.pipelines)
        count = min(strategy.microbatches, batch_rows)
        order = schedule.SCHEDULES["1f1b" if name == schedule.PIPEDREAM else name]
        return plan.Split(
            stages.devices,
            name,
            order(len(stages.devices), count),
            count,
            batch_rows,
            costs.slots_of(getattr(model, "optimizer", None)),
            [stages.others_of(number) for number in range(len(stages.devices))],
        )

    def _measured(self, found: Sequence[LayerCost], split: plan.Split) -> list[Times] | None:
        """Measured times of layers for a micro-batch; None if not wanted or not worthwhile."""
        if not self._measures or not measure.is_worth_it(found, split.rows):
            return None
        return measure.measured(found, split.rows_of_microbatch, split.devices[0])

    def _stages_of(
        self, found: Sequence[LayerCost], times: Sequence[Times], split: plan.Split, trains: bool
    ) -> list[int]:
        """The stages of a model's layers, by their costs in the order of their calls."""
        names = [cost.layer.name for cost in found]
        known = [self._stages.of(cost.layer) for cost in found]
        placed = [number for number in known if number is not None]
        if found and len(placed) == len(found):
            return placed
        if self._patterns is not None:
            return partition.by_patterns(names, self._patterns, all_fit=not self._plans)
        if placed:
            return partition.with_neighbours(known)
        stages = len(self._stages.devices)
        return partition.balance(
            [one.total for one in times],
            stages if trains else min(stages, len(found)),
            costs.MemoryOfParts(found, split.kept_rows, split.slots),
            [costs.sent_before(found, number) for number in range(len(found))].__getitem__,
        )

    def _put_variables(self, model: keras.Model) -> None:
        seen, last = set(), len(self._stages.devices) - 1

        def visit(layer: keras.Layer, number: int | None) -> None:
            if id(layer) in seen:
                return
            seen.add(id(layer))
            # What is inside a layer is where the layer is.
            number = self._stages.of(layer) if number is None else number
            of_layer = [
                *layer._trainable_variables,
                *layer._non_trainable_variables,
                *(generator.state for generator in layer._seed_generators),
            ]
            for variable in of_layer:
                self._variables.place(variable, last if number is None else number)
            for inner in layer._layers:
                visit(inner, number)

        visit(model, None)
        self._variables.place_slots()
