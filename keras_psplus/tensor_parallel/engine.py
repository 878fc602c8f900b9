"""Engines of `ModelParallelStrategy`: of whole slots, or of slots in shares."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import sum_packed
from keras_psplus.all_reduce.engine import AllReduceEngine
from keras_psplus.all_reduce.reducers import with_shape
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.graph.variables import shape_to_be
from keras_psplus.engine import Call, answers
from keras_psplus.log import logger
from keras_psplus.sharding.engine import ShardedEngine
from keras_psplus.sharding.full_engine import WeightSharesEngine
from keras_psplus.sharding.places import PieceCut, Place
from keras_psplus.sharding.plan import OptimizerPlan, foreign_method, reason_for_wholes
from keras_psplus.sharding.units import Units
from keras_psplus.sharding.variable import ParameterPart, in_update
from keras_psplus.sharding.weight import PartOfWeight, WeightShare, WholeWeight
from keras_psplus.tensor_parallel import plan, rules
from keras_psplus.tensor_parallel.group import LocalPart, ModelGroup, local_part_of, part_of
from keras_psplus.tensor_parallel.layer_calls import LayerCalls
from keras_psplus.tensor_parallel.variable import CutWeight, PieceWeight, cut_of

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

    from keras_psplus.engine import Gradients, Variables
    from keras_psplus.sharding.engine import Places
    from keras_psplus.sharding.sums import Sums

# Between seeds of the workers of a row, where they draw for their own heads.
_SEED_STRIDE = 0x2545F491


class PartUnits(Units):
    """Units of layers whose outputs may be in parts."""

    def __init__(self, group: ModelGroup, *args: Any) -> None:
        self._group = group
        super().__init__(*args)

    def part_of(self, tensor: tf.Tensor) -> tf.Tensor:
        found = local_part_of(tensor)
        return tensor if found is None else found.tensor

    def whole_of(self, tensor: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        found = local_part_of(tensor)
        return part if found is None else self._group.stack(part, found.axis)


class ModelParallelEngine(ShardedEngine):
    """Cuts weights along axes of the mesh; layers compute with the parts."""

    compiles_by_default, exports_copies = False, True
    has_weights_in_memory = has_whole_weights = False
    cuts_weights = True

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        self._described: weakref.WeakSet[keras.Model] = weakref.WeakSet()

    @functools.cached_property
    def layer_calls(self) -> LayerCalls:
        return LayerCalls(self.strategy.extended.group, self._note_messages)

    def _note_messages(self) -> None:
        compiled = self.compiled_calls_here()
        if compiled is not None:
            compiled.note(
                "layers with weights in parts: they talk to other workers. Attention by heads is "
                "compiled if its biases are in parts as well"
            )

    def is_cut(self, operation: Any) -> bool:
        if not isinstance(operation, keras.Layer) or operation is self.layer_calls.compiled:
            return False
        return any(cut_of(variable) is not None for variable in operation.variables)

    def _make_plan(self, optimizer: Optimizer) -> OptimizerPlan:
        return plan.CutPlan(optimizer)

    # Variables.

    def build(self, call: Call) -> None:
        super().build(call)
        model, strategy = call.owner, self.strategy
        if model in self._described:
            return
        self._described.add(model)
        unused = strategy.layouts.check_used(variable.path for variable in model.variables)
        if strategy.is_chief:
            logger.info("%s", plan.describe(model, strategy.layouts, unused, strategy.grid))

    @answers("initialize")
    def _initialize(self, call: Call) -> Any:
        variable, value = call.owner, call.get("value")
        axis = None
        if variable.trainable and not isinstance(value, tf.Variable):
            shape = shape_to_be(variable, value)
            axis = self.strategy.layouts.axis_of(variable.path, shape or ())
        if axis is None:
            return super()._initialize(call)
        extended = self.strategy.extended
        ways, parts = (self.layer_calls.read, extended.group.split), extended.group.size
        extended.share(
            variable, value, lambda: CutWeight(extended.store, *ways, variable, axis, parts)
        )
        return None

    @answers("add_slot")
    def _add_slot(self, call: Call) -> keras.Variable:
        weight = cut_of(call.get("reference_variable"))
        # Gradients of parts are added up, also where updates gather their mean.
        if weight is not None and call.get("name") == "gradient_accumulator":
            return self._add_slot_in_shares(call, Place(weight.cut))
        if weight is not None and reason_for_wholes(call.owner) is None:
            return self._add_slot_in_shares(call)
        return AllReduceEngine._add_slot(self, call)

    # A step.

    @answers("call_layer")
    def _call_layer(self, call: Call) -> Any:
        return self.layer_calls.call(call, super()._call_layer)

    @answers("sparse_categorical_crossentropy", "categorical_crossentropy", "argmax")
    def _over_classes(self, call: Call) -> Any:
        compute = rules.argmax if call.name == "argmax" else rules.cross_entropy
        return compute(call, self.strategy.extended.group)

    @answers("next_seed")
    def _next_seed(self, call: Call) -> tf.Tensor:
        seed = super()._next_seed(call)
        if not self.layer_calls.regions.are_local:
            return seed
        offset = self.strategy.extended.group.place * _SEED_STRIDE % (1 << 31)
        return seed + tf.constant([offset, 0], seed.dtype)

    @answers("check_finite")
    def _check_finite(self, call: Call) -> tf.Tensor:
        finite = super()._check_finite(call)
        if not tf.distribute.get_replica_context():
            return finite
        # Gradients of cut weights are each worker's own.
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.equal(self._sum_over_parts([bad])[0], 0.0)

    def gradient(self, call: Call) -> Any:
        sources = call.get("sources")
        # Also those of a chain rule, as in `keras.remat`, which reads whole weights.
        is_of_cut = any(cut_of(one) is not None for one in tf.nest.flatten(sources))
        if current_step() is None or not is_of_cut:
            return super().gradient(call)

        def of_wholes(*args: Any, **kwargs: Any) -> Any:
            found = tf.nest.flatten(call.original(*args, **kwargs))
            # Norms that a step computes are those of whole gradients.
            wholes = self.of_whole_weights(found, tf.nest.flatten(sources))
            return tf.nest.pack_sequence_as(sources, wholes)

        return super().gradient(dataclasses.replace(call, original=of_wholes))

    def of_whole_weights(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        found = []
        for g, weight in zip(grads, map(cut_of, variables)):
            # Zeros of what a loss does not depend on may be whole.
            if g is not None and weight is not None and g.shape != weight.cut.shape:
                axis, local = weight.cut.axis, g
                dense = tf.ensure_shape(tf.convert_to_tensor(local), weight.local_shape)
                g = self.strategy.extended.group.stack(dense, axis)
                g._local_part = LocalPart(local, axis)
            found.append(g)
        return found

    def parts_of_weights(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        weights = map(cut_of, variables)
        return [g if g is None or w is None else self._part(g, w) for g, w in zip(grads, weights)]

    def _part(self, gradient: Any, weight: CutWeight) -> Any:
        axis, is_dense = weight.cut.axis, not isinstance(gradient, tf.IndexedSlices)
        found = part_of(gradient, axis) if is_dense else None
        if found is not None or gradient.shape == weight.local_shape:
            return gradient if found is None else found
        whole = tf.ensure_shape(tf.convert_to_tensor(gradient), weight.cut.shape)
        return self.strategy.extended.group.own(whole, axis)

    def sum_parts(
        self, parts: Sequence[Any], variables: Sequence[Any], optimizer: Any
    ) -> list[Any]:
        local = self.parts_of_weights(list(parts), list(variables))
        sums = super().sum_parts(local, variables, optimizer)
        wholes = self.of_whole_weights(sums, list(variables))
        return [whole if a is not b else s for a, b, s, whole in zip(parts, local, sums, wholes)]

    def reduce(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> list[Any]:
        grads = self._of_script(grads, variables)
        if self.strategy.num_replicas_in_sync == 1:
            return [with_shape(gradient, v) for gradient, v in zip(grads, variables)]
        return AllReduceEngine.reduce(self, optimizer, list(grads), variables)

    def _of_script(self, grads: Gradients, variables: Variables) -> Gradients:
        """Gradients in parts: outside of steps, a script computes with whole weights."""
        is_whole = current_step() is None
        return self.parts_of_weights(list(grads), list(variables)) if is_whole else grads

    def _is_part(self, gradient: Any) -> bool:
        return True

    def _cut_if_dense(self, before: list[Any], clipped: list[Any], places: Places) -> list[Any]:
        return clipped

    def clip(self, optimizer: Optimizer, grads: list[Any], variables: Variables) -> list[Any]:
        grads = list(grads)
        for i, place in enumerate(self._placed(optimizer, variables)):
            weight, is_dense = cut_of(variables[i]), not isinstance(grads[i], tf.IndexedSlices)
            # Of what is dense, an owner has the whole already.
            if weight is not None and place.cut is None and (place.owner is None or not is_dense):
                grads[i] = self._whole(grads[i], weight)
        return super().clip(optimizer, grads, variables)

    def _whole(self, gradient: Any, weight: CutWeight) -> Any:
        group, axis = self.strategy.extended.group, weight.cut.axis
        if not isinstance(gradient, tf.IndexedSlices):
            return group.gather(tf.ensure_shape(gradient, weight.local_shape), axis)
        # Rows keep their repeats, which Keras squares one by one.
        values, indices = group.gather(gradient.values, axis), gradient.indices
        if axis == 0:
            first = tf.cast(group.place * weight.local_shape[0], indices.dtype)
            indices = group.gather(indices + first, 0)
        return tf.IndexedSlices(values, indices, tf.cast(weight.cut.shape, indices.dtype))

    def _target(self, variable: keras.Variable, place: Place) -> Any:
        weight = cut_of(variable)
        if weight is None or place.cut is not None:
            return variable
        axis = weight.cut.axis
        return WholeWeight(weight, self.strategy.extended.group.gather(weight.part.value(), axis))

    def accumulate(self, optimizer: Optimizer, grads: list[Any], variables: list[Any]) -> None:
        grads = self._of_script(grads, variables)
        with in_update.raised():
            super().accumulate(optimizer, grads, variables)

    def update(self, optimizer: Optimizer, grads: list[Any], variables: Variables) -> None:
        targets, self._targets = [self._targets[id(v)] for v in variables], {}
        with in_update.raised():
            optimizer._backend_update_step(grads, targets, optimizer.learning_rate)
        places = self._placed(optimizer, variables)
        self._spread_wholes(optimizer, variables, places, targets)


class ShardedModelParallelEngine(ModelParallelEngine):
    """Cuts the slots, too, of what the workers of a column have alike: `shard="optimizer"`.

    What an optimizer updates as a whole has one owner among all workers of the mesh.
    """

    def _make_plan(self, optimizer: Optimizer) -> OptimizerPlan:
        grid = self.strategy.grid
        return plan.PiecePlan(optimizer, len(grid.rows), len(grid.rows[0]))

    @property
    def _rank(self) -> int:
        rank: int = self.strategy.extended.world.rank
        return rank

    @answers("add_slot")
    def _add_slot(self, call: Call) -> keras.Variable:
        if call.get("name") == "gradient_accumulator" or foreign_method(call.owner) is not None:
            return super()._add_slot(call)
        if reason_for_wholes(call.owner) is not None:
            return ShardedEngine._add_slot(self, call)
        return self._add_slot_in_shares(call)

    # Of a column, as all-reduce's workers with their optimizers' state in shares.

    def reduce(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> list[Any]:
        return ShardedEngine.reduce(self, optimizer, self._of_script(grads, variables), variables)

    update = ShardedEngine.update
    # Where nothing is in pieces, it leaves all as it is.
    _cut_if_dense = ShardedEngine._cut_if_dense

    def _own_part(self, gradient: Any, variable: keras.Variable, place: Place) -> Any:
        weight = cut_of(variable)
        if place.owner is not None and weight is not None and self._is_owners_row(place):
            gradient = self._whole(gradient, weight)
        return super()._own_part(gradient, variable, place)

    def _is_owners_row(self, place: Place) -> bool:
        """Whether the owner of a variable is in this worker's row."""
        # They are counted along columns.
        assert place.owner is not None
        return place.owner % len(self.strategy.grid.rows) == self._rank

    def _summand(self, gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        # Of what a row has alike, the first worker's.
        place, size = self.strategy.extended.group.place, self.strategy.extended.group.size
        weight = cut_of(variable)
        if weight is None:
            # Not zeros of its shape: a row gathers what is used, and so all of it have to use it.
            return tf.raw_ops.ZerosLike(x=gradient) if place else gradient
        width = gradient.shape[weight.cut.axis]
        around = [[0, 0] for _ in gradient.shape]
        around[weight.cut.axis] = [place * width, (size - 1 - place) * width]
        return tf.pad(gradient, around)

    def _parts_of_squares(
        self, grads: Sequence[Any], variables: Variables, places: Places
    ) -> tuple[list[int], Sums]:
        in_columns = [not isinstance(gradient, tf.IndexedSlices) for gradient in grads]
        # An owner alone has a gradient that is dense, and all workers have whole rows.
        in_rows = [
            cut_of(variable) is not None if place.owner is None else is_dense
            for variable, place, is_dense in zip(variables, places, in_columns)
        ]
        parts = [i for i in range(len(grads)) if in_columns[i] or in_rows[i]]

        def total(squares: list[tf.Tensor]) -> list[tf.Tensor]:
            found = dict(zip(parts, squares))
            for launcher, has_parts in (
                (self.strategy.extended.launcher(0), in_columns),
                (self.strategy.extended.group.launcher, in_rows),
            ):
                own = [i for i in parts if has_parts[i]]
                found |= zip(own, sum_packed(launcher, [found[i] for i in own]))
            return [found[i] for i in parts]

        return parts, total

    def _meet(self) -> list[tf.Tensor]:
        # Those of a row wait for each other in each step.
        return sum_packed(self.strategy.extended.launcher(0), [tf.zeros([])])

    def _target(self, variable: keras.Variable, place: Place) -> Any:
        if place.cut is not None:
            return ParameterPart(variable, place, self._rank)
        weight = cut_of(variable)
        if place.owner is None:
            return super()._target(variable, place)
        if weight is None or not self._is_owners_row(place):
            return variable if self._holds(place) else None
        whole = self.strategy.extended.group.gather(weight.part.value(), weight.cut.axis)
        return WholeWeight(weight, whole) if self._holds(place) else None


class FullyShardedModelParallelEngine(WeightSharesEngine, ShardedModelParallelEngine):
    """Cuts the weights of which the workers of a column have the same, too: `shard="all"`."""

    def _make_units(self, *args: Any) -> PartUnits:
        return PartUnits(self.strategy.extended.group, *args)

    def is_cut(self, operation: Any) -> bool:
        return super().is_cut(operation) or ModelParallelEngine.is_cut(self, operation)

    def _make_weight(self, variable: keras.Variable) -> PartOfWeight:
        shape, extended, units = tuple(variable._shape), self.strategy.extended, self.units
        axis = self.strategy.layouts.axis_of(variable.path, shape)
        if axis is not None:
            ways, parts = (self.layer_calls.read, extended.group.split), extended.group.size
            return PieceWeight(units, extended.store, *ways, variable, axis, parts)
        rows = len(self.strategy.grid.rows)
        place = Place(PieceCut(None, Place.of_parts(shape, rows).parts, extended.group.size))
        return WeightShare(extended.store, place, units.read, units.note_write, variable)

    def _gathered(self, weight: PartOfWeight, place: Place) -> tf.Tensor:
        extended, pieces = self.strategy.extended, weight.place.parts
        row = tf.reshape(weight.part.value(), [1, pieces.width])
        part, cut = pieces.whole(extended.route.gather(row)), cut_of(weight)
        if cut is None or not (place.is_everywhere or self._is_owners_row(place)):
            return part
        return extended.group.gather(part, cut.cut.axis)
