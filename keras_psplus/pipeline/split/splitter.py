"""Splitter of models into stages, which splits each before its first use."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core import plan as plan_request
from keras_psplus.engine import Engine
from keras_psplus.keras_internals.keras_parts import TensorFlowTrainer, unpack_x_y_sample_weight
from keras_psplus.log import logger
from keras_psplus.pipeline.base import microbatches, schedule
from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.split import costs, measure, memory, partition, plan
from keras_psplus.pipeline.split.costs import LayerCost
from keras_psplus.pipeline.split.measure import Times
from keras_psplus.pipeline.split.variables import Variables
from keras_psplus.pipeline.step import train_step

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
            batch_spec: Structure of a batch: something with shapes and dtypes.
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
            memory.slots_of(getattr(model, "optimizer", None)),
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
            memory.MemoryOfParts(found, split.kept_rows, split.slots),
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
