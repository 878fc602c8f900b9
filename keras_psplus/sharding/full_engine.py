"""Engines with weights, gradients and the optimizer's state in shares."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.core.graph.compiled_calls import have_weights
from keras_psplus.core.graph.subgraph import nodes_in_order
from keras_psplus.core.models import is_unit
from keras_psplus.engine import Call, answers
from keras_psplus.log import logger
from keras_psplus.sharding.engine import ShardedEngine
from keras_psplus.sharding.places import AxisCut, Place
from keras_psplus.sharding.units import Units
from keras_psplus.sharding.variable import ShareVariable, count_writes, in_update, shares_of
from keras_psplus.sharding.weight import PartOfWeight, WeightShare, WholeWeight

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

    from keras_psplus.core.graph.compiled_calls import CompiledFunction
    from keras_psplus.sharding.places import Place
    from keras_psplus.sharding.plan import OptimizerPlan

    _Shares = ShardedEngine
else:
    _Shares = object


class WeightSharesEngine(_Shares):
    """Mixin of weights in shares for an engine with an optimizer's state in shares."""

    compiles_by_default, exports_copies = False, True
    # The chief need not have room for the model.
    has_weights_in_memory = has_whole_weights = False

    @functools.cached_property
    def units(self) -> Units:
        extended = self.strategy.extended
        frees = self.strategy.reshard_after_forward
        _, compressor = extended.compressors
        units = self._make_units(extended.route, extended.bucket_bytes, frees, compressor)
        self.strategy.communication.add_source(units.traffic.traffic, lambda: 0.0)
        return units

    def _make_units(self, *args: Any) -> Units:
        return Units(*args)

    @property
    def compiled_function(self) -> Callable[..., CompiledFunction]:  # type: ignore[override]
        return self.units.function

    def is_cut(self, operation: Any) -> bool:
        return isinstance(operation, keras.Layer) and not is_unit(operation)

    def _make_plan(self, optimizer: Optimizer) -> OptimizerPlan:
        weights = {id(variable) for variable in optimizer._trainable_variables}
        for variable in optimizer.variables:
            # An update reads the whole of it, whatever it is of.
            if share_of(variable) is not None and id(variable) not in weights:
                self._make_whole(variable)
        return super()._make_plan(optimizer)

    def _make_whole(self, variable: keras.Variable) -> None:
        """Gives every worker the whole of a variable that was cut as a weight."""
        share = variable._value
        name = share.name.removesuffix(":0")
        with tf.init_scope(), self.strategy.scope():
            whole = ShareVariable.value(share)
            variable._value = tf.Variable(whole, trainable=variable.trainable, name=name)

    # Variables.

    @answers("initialize_with_initializer")
    def _initialize_with_initializer(self, call: Call) -> Any:
        if not self.strategy.is_chief and _is_cut(call.owner) and _is_pure(call.get("initializer")):
            # It would be drawn for nothing, and be in memory as a whole.
            call = call.changed(initializer=lambda shape, dtype: None)
        return super()._initialize_with_initializer(call)

    @answers("initialize")
    def _initialize(self, call: Call) -> Any:
        variable, value = call.owner, call.get("value")
        if not _is_cut(variable) or isinstance(value, tf.Variable):
            return super()._initialize(call)
        self.strategy.extended.share(variable, value, lambda: self._make_weight(variable))
        return None

    def _make_weight(self, variable: keras.Variable) -> PartOfWeight:
        """The value of a variable whose shape is known, without memory for its whole."""
        store, units = self.strategy.extended.store, self.units
        place = Place.of_parts(tuple(variable._shape), store.workers)
        return WeightShare(store, place, units.read, units.note_write, variable)

    def _change_averages(self, call: Call) -> Any:
        optimizer = call.get("optimizer", call.owner)
        are_cut = all(share_of(one) is not None for one in optimizer._trainable_variables)
        if not are_cut or self.plan_of(optimizer).reason is not None:
            return super()._change_averages(call)
        # Averages are cut as well: each worker computes with its parts.
        with in_update.raised():
            result = super()._change_averages(call)
        if tf.executing_eagerly():
            count_writes(shares_of(optimizer._trainable_variables + optimizer.variables))
        return result

    # A step.

    @answers("call_layer")
    def _call_layer(self, call: Call) -> Any:
        weights: list[PartOfWeight] = []
        if not (self.units.is_in_call or tf.executing_eagerly()):
            weights = _weights_of_unit(call.owner)
        if not weights:
            return super()._call_layer(call)
        return self.units.call(weights, super()._call_layer, call)

    @answers("run_graph")
    def _run_graph(self, call: Call) -> Any:
        if self.units.is_in_call or tf.executing_eagerly():
            return super()._run_graph(call)
        layers = [node.operation for node in nodes_in_order(call.owner)]
        # Of what has units inside, it is not known what it calls.
        # XLA compiles units by themselves: their weights are gathered in between.
        with self.units.following([_weights_of_unit(one) for one in layers if have_weights([one])]):
            return call.proceed()

    def gradient(self, call: Call) -> Any:
        self.units.note_gradient()

        def regathering(*args: Any, **kwargs: Any) -> Any:
            with self.units.backward():
                return call.original(*args, **kwargs)

        return super().gradient(dataclasses.replace(call, original=regathering))

    def _target(self, variable: keras.Variable, place: Place) -> Any:
        weight = share_of(variable)
        if weight is None:
            return super()._target(variable, place)
        if place.cut is not None:
            return variable
        # All workers gather, also for one alone.
        whole = self._gathered(weight, place)
        self.units.count([weight])
        return WholeWeight(weight, whole) if self._holds(place) else None

    def _gathered(self, weight: PartOfWeight, place: Place) -> tf.Tensor:
        """The whole of a weight in an update, where one takes place."""
        return weight.gathered(self.strategy.extended.route)


class FullyShardedEngine(WeightSharesEngine, ShardedEngine):
    """Cuts the weights, too: ZeRO stage 3, or FSDP."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        self._described: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    def build(self, call: Call) -> None:
        super().build(call)
        model = call.owner
        if self.strategy.is_chief and model not in self._described:
            self._described.add(model)
            logger.info("%s", _describe(model, self.strategy.extended.control.names))


def share_of(variable: keras.Variable) -> PartOfWeight | None:
    """A weight that units gather, by its Keras variable; None for others."""
    weight = variable._value
    is_share = isinstance(weight, PartOfWeight) and not isinstance(weight.place.cut, AxisCut)
    return weight if is_share else None


def _weights_of_unit(layer: Any) -> list[PartOfWeight]:
    """Weights in shares of a layer that is a unit, each once."""
    if not (isinstance(layer, keras.Layer) and is_unit(layer)):
        return []
    weights = {id(variable._value): share_of(variable) for variable in layer.variables}
    return [one for one in weights.values() if one is not None]


def _is_cut(variable: keras.Variable) -> bool:
    """Whether each worker is to keep a part of a variable that is being made."""
    return variable.trainable and tf.as_dtype(variable._dtype).is_floating


def _is_pure(initializer: Any) -> bool:
    """Whether an initializer is Keras's own, and changes no state when it draws."""
    kind, seed = type(initializer), getattr(initializer, "seed", None)
    is_of_keras = getattr(keras.initializers, kind.__name__, None) is kind
    return is_of_keras and not isinstance(seed, keras.random.SeedGenerator)


def _describe(model: keras.Model, names: Sequence[str]) -> str:
    """Table of what each worker keeps of a model's weights."""
    sizes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.variables]
    shares = [share_of(variable) for variable in model.variables]
    cut = sum(share is not None for share in shares)
    rows = [("worker", "weights MB", "of all")]
    own = sum(sizes)
    for share, size in zip(shares, sizes):
        if share is not None:
            own += share.place.parts.width * share.dtype.size - size
    rows += [(name, f"{own / 1e6:.2f}", f"{own / max(1, sum(sizes)):.0%}") for name in names]
    return (
        f"'{model.name}' in shares: {cut} of {len(sizes)} variables are cut into equal parts, "
        f"of {sum(sizes) / 1e6:.2f} MB\n{text_table.aligned(rows)}"
    )
