"""Puts models on stages: each is split once, before it is used for the first time."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from keras_psplus.keras_parts import unpack_x_y_sample_weight
from keras_psplus.log import logger
from keras_psplus.pipeline import costs, partition, plan


class Splitter:
    """Splits the models of one strategy.

    Args:
        strategy: `PipelineStrategy`.
        patterns: For each stage, a list of patterns of layers' names; None for none.
    """

    def __init__(self, strategy: Any, patterns: list[list[str]] | None) -> None:
        self._strategy, self._patterns = weakref.ref(strategy), patterns
        self._plans: weakref.WeakKeyDictionary[keras.Model, plan.Plan] = weakref.WeakKeyDictionary()
        # Models whose outputs have masks.
        self._masked: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    @property
    def _owner(self) -> Any:
        return self._strategy()

    def has_masks(self, model: keras.Model) -> bool:
        """Whether a model's outputs have masks."""
        return model in self._masked

    def split(self, engine: Any, model: keras.Model, batch_spec: Any, trains: bool) -> None:
        """Puts a model's layers and variables on stages, once.

        Args:
            engine: `PipelineEngine`.
            model: Keras model.
            batch_spec: Structure of a batch: something with shapes and dtypes.
            trains: Whether it is to be trained, for which no stage may be without layers.

        Raises:
            ValueError: If there are fewer layers than stages, or patterns do not fit.
        """
        if model in self._plans:
            return
        x, _, _ = unpack_x_y_sample_weight(batch_spec)
        with self._owner.scope():
            found, has_mask = costs.of_layers(engine, model, x)
        if has_mask:
            self._masked.add(model)
        stages = self._owner.stages
        for cost in found:
            # Of another model that was split before, perhaps inside of one of its layers.
            placed = [self._owner.variables.stage_of_placed(v) for v in cost.layer.variables]
            known = next((number for number in placed if number is not None), None)
            if known is not None:
                stages.put(cost.layer, known)
        numbers = self._stages_of(found, trains)
        for cost, number in zip(found, numbers):
            stages.put(cost.layer, number)
        self._put_variables(model)
        made = plan.make(
            model.name,
            found,
            numbers,
            stages.devices,
            self._owner.microbatches,
            [stages.others_of(number) for number in range(len(stages.devices))],
        )
        self._plans[model] = self._owner.plan = made
        logger.info("%s", made)

    def _stages_of(self, found, trains):
        """The stages of a model's layers, by their costs in the order of their calls."""
        names = [cost.layer.name for cost in found]
        known = [self._owner.stages.of(cost.layer) for cost in found]
        if found and None not in known:
            return known
        if self._patterns is not None:
            return partition.by_patterns(names, self._patterns, all_fit=not self._plans)
        if any(number is not None for number in known):
            return partition.with_neighbours(known)
        stages = self._owner.num_stages
        # Layers without work (Flatten, Dropout in evaluation) count a little: they are calls.
        work = [cost.flops + 1.0 for cost in found]
        return partition.balance(work, stages if trains else min(stages, len(found)))

    def _put_variables(self, model):
        variables, seen = self._owner.variables, set()
        last = self._owner.num_stages - 1

        def visit(layer, number):
            if id(layer) in seen:
                return
            seen.add(id(layer))
            # What is inside a layer is where the layer is.
            number = self._owner.stages.of(layer) if number is None else number
            of_layer = [
                *layer._trainable_variables,
                *layer._non_trainable_variables,
                *(generator.state for generator in layer._seed_generators),
            ]
            for variable in of_layer:
                variables.place(variable, last if number is None else number)
            for inner in layer._layers:
                visit(inner, number)

        visit(model, None)
        variables.place_slots()
