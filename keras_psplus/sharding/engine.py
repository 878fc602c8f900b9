"""Engine of all-reduce with the optimizer's state in shares."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import sum_packed
from keras_psplus.all_reduce.engine import AllReduceEngine
from keras_psplus.all_reduce.reducers import with_shape
from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
from keras_psplus.core.base.optimizers import is_wrapper, iterations_of, optimizers_of
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.models import lifted
from keras_psplus.engine import Call, answers
from keras_psplus.keras_internals.keras_parts import base_optimizer, ops
from keras_psplus.log import logger
from keras_psplus.sharding import sums
from keras_psplus.sharding.exchange import PartExchange
from keras_psplus.sharding.plan import OptimizerPlan
from keras_psplus.sharding.variable import (
    ParameterPart,
    ShareVariable,
    are_in_parts,
    count_writes,
    in_update,
    on_worker,
    shares_of,
)
from keras_psplus.sharding.weight import PartOfWeight, WholeWeight

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

    from keras_psplus.engine import Gradients, Variables
    from keras_psplus.sharding.places import Place

    Places = Sequence[Place]

_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)


class ShardedEngine(AllReduceEngine):
    """Cuts what an optimizer keeps and updates; see `keras_psplus.sharding`."""

    can_run_eagerly = False
    # Whether each worker keeps all of the weights.
    has_whole_weights = True
    plan_class = OptimizerPlan

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        self._plans: weakref.WeakKeyDictionary[Any, OptimizerPlan] = weakref.WeakKeyDictionary()
        self._exchanges: weakref.WeakKeyDictionary[Any, PartExchange] = weakref.WeakKeyDictionary()
        # Place of the slot that is being made; and the parts of variables in this update.
        self._place_of_slot: Callable[[], Place] | None = None
        self._targets: dict[int, Any] = {}

    def plan_of(self, optimizer: Optimizer) -> OptimizerPlan:
        """Places of an optimizer's state; decided when the first of it is used."""
        plan = self._plans.get(optimizer)
        if plan is None:
            extended = self.strategy.extended
            plan = self._plans[optimizer] = self._make_plan(optimizer)
            for state, place in plan.states_to_move(optimizer):
                self._move(state, place)
            for slot in optimizer.variables:
                if isinstance(slot._value, ShareVariable):
                    # Other workers may ask for it from now on.
                    assert slot._value.place is not None
            if self.strategy.is_chief:
                logger.info("%s", plan.describe(optimizer, extended.control.names, extended.places))
        return plan

    def _make_plan(self, optimizer: Optimizer) -> OptimizerPlan:
        return self.plan_class(optimizer, self.strategy.extended.store.workers)

    def _move(self, state: keras.Variable, place: Place) -> None:
        """Leaves what every worker has made to the one whose updates change it."""
        mirrored, rank = state._value, self.strategy.extended.store.rank
        store = self.strategy.extended.store
        with lifted(self.strategy):
            state._value = ShareVariable(
                store,
                mirrored.shape,
                mirrored.dtype,
                state.path,
                lambda: place,
                lambda of, shape: of.local_part(mirrored.read_value(), rank),
            )
        state._value.release_with(state)

    # Variables.

    def build(self, call: Call) -> None:
        super().build(call)
        self.place(call.owner)

    def place(self, model: keras.Model) -> None:
        for optimizer in optimizers_of(model).values():
            if optimizer.built and not is_wrapper(optimizer):
                self.plan_of(optimizer)

    @answers("add_slot")
    def _add_slot(self, call: Call) -> keras.Variable:
        name, initializer = call.get("name"), call.get("initializer", "zeros")
        if name == "gradient_accumulator" or not isinstance(
            keras.initializers.get(initializer), _CONSTANTS
        ):
            # Each worker adds up its own gradients.
            return super()._add_slot(call)
        return self._add_slot_in_shares(call)

    def _add_slot_in_shares(self, call: Call, place: Place | None = None) -> keras.Variable:
        name, initializer = call.get("name"), call.get("initializer", "zeros")
        optimizer, reference_variable = call.owner, call.get("reference_variable")
        of, number = weakref.ref(optimizer), optimizer._get_variable_index
        outer = self._place_of_slot
        self._place_of_slot = lambda: place or self.plan_of(of()).places[number(reference_variable)]
        try:
            # Not TensorFlow's half of Keras, which asks for the place of a mirrored variable.
            return base_optimizer.BaseOptimizer.add_variable_from_reference(
                optimizer, reference_variable, name=name, initializer=initializer
            )
        finally:
            self._place_of_slot = outer

    @answers("initialize_with_initializer")
    def _initialize_with_initializer(self, call: Call) -> Any:
        if (find_place := self._place_of_slot) is None:
            return super()._initialize_with_initializer(call)
        variable, initializer = call.owner, call.get("initializer")
        whole, dtype, store = tuple(variable._shape), variable._dtype, self.strategy.extended.store

        def initial(place: Place, shape: tf.TensorShape) -> Any:
            if isinstance(initializer, _CONSTANTS):
                return initializer(tuple(shape), dtype=dtype)
            return place.local_part(initializer(whole, dtype=dtype), store.rank)

        variable._value = ShareVariable(store, whole, dtype, variable.path, find_place, initial)
        variable._value.release_with(variable)
        return None

    @answers("set_weights")
    def _set_weights(self, call: Call) -> Any:
        return self._change(call, call.owner.weights)

    @answers("change_averages")
    def _change_averages(self, call: Call) -> Any:
        optimizer = call.get("optimizer", call.owner)
        return self._change(call, optimizer._model_variables_moving_average)

    def _change(self, call: Call, variables: Sequence[Any]) -> Any:
        if not are_in_parts(variables):
            return call.proceed()  # A worker may do so alone.
        with self.strategy.extended.store.together(type(call.owner).__name__):
            return call.proceed()

    @answers("restore")
    def _restore(self, event: Call) -> Any:
        reads = self.strategy.is_chief
        with self.strategy.extended.store.restores() if reads else contextlib.nullcontext():
            return super()._restore(event)

    # The way of a gradient.

    def apply(self, call: Call) -> Any:
        step, optimizer, trained = current_step(), call.owner, call.get("trainable_variables")
        if is_wrapper(optimizer) or (step is not None and step.has_batch_fraction):
            return super().apply(call)
        # A step of the script's: nobody else counts it, for reads by other workers.
        of_step = shares_of(optimizer._trainable_variables if trained is None else trained)
        if of_step and step is None:
            # Nor do other workers take part: they may still read what is there now.
            meet, name = self.strategy.extended.store.meet, optimizer.name
            _call_in_order(lambda: meet("weights", name), of_step)
        result = super().apply(call)
        written = of_step + shares_of(optimizer.variables)
        _call_in_order(lambda: count_writes(written), written)
        return result

    @property
    def _rank(self) -> int:
        """This worker's place among those that update parts of one variable."""
        return self.strategy.extended.store.rank

    def _holds(self, place: Place) -> bool:
        """Whether this worker updates a variable, or a part of it."""
        return place.holds(self.strategy.extended.store.rank)

    def _placed(self, optimizer: Optimizer, variables: Variables) -> list[Place]:
        """Places of variables' updates."""
        places = self.plan_of(optimizer).in_updates
        return [places[optimizer._get_variable_index(v)] for v in variables]

    def reduce(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> list[Any]:
        places, step = self._placed(optimizer, variables), MirroredReplicaStep.current()
        grads, count = list(grads), range(len(grads))
        in_rows = {i for i in count if isinstance(grads[i], tf.IndexedSlices)}
        known = {i for i in count if step is not None and id(variables[i]) in step.whole}
        cut = [i for i in count if places[i].cut is not None and i not in in_rows]
        owned = [i for i in count if places[i].owner is not None and i not in in_rows]
        # Compressors sum whole gradients for owners.
        compresses = self.strategy.extended.reducers.compresses
        rest = sorted(set(count).difference(cut, () if compresses else owned))
        if rest:
            chosen = [grads[i] for i in rest], [variables[i] for i in rest]
            for i, total in zip(rest, super().reduce(optimizer, *chosen)):
                grads[i] = total
        known |= set(owned if compresses else ())
        for i in [*cut, *owned]:
            grads[i] = with_shape(grads[i], variables[i])
        for i in known.intersection([*cut, *owned]):
            # They are summed already: the step has computed with them.
            grads[i] = self._own_part(grads[i], variables[i], places[i])
        parts = [i for i in cut if i not in known]
        if parts:
            found = self._exchange(optimizer).scatter(
                [grads[i] for i in parts],
                [on_worker(variables[i]) for i in parts],
                [places[i].parts for i in parts],
                [optimizer._get_variable_index(variables[i]) for i in parts],
                iterations_of(optimizer),
            )
            for i, part in zip(parts, found):
                grads[i] = part
        self._scatter_to_owners(
            optimizer, grads, variables, places, [i for i in owned if i not in known]
        )
        return grads

    def _own_part(self, gradient: Any, variable: keras.Variable, place: Place) -> Any:
        """Part of a sum that all workers have for this one's update, or None."""
        if not self._holds(place):
            return None
        return gradient if place.cut is None else place.local_part(gradient, self._rank)

    def _scatter_to_owners(
        self,
        optimizer: Optimizer,
        grads: list[Any],
        variables: Variables,
        places: Places,
        numbers: Sequence[int],
    ) -> None:
        extended, exchange = self.strategy.extended, self._exchange(optimizer)
        for own, layout in sums.layouts(variables, places, numbers, extended.store.workers):
            tensors = [self._summand(grads[i], variables[i]) for i in own]
            totals = layout.scatter(extended.store.route, tensors, extended.store.rank)
            held = [i for i, total in zip(own, totals) if total is not None]
            of_own = [total for total in totals if total is not None]
            step = iterations_of(optimizer)
            mine = exchange.sum_between(of_own, [variables[i] for i in held], step)
            for i in own:
                grads[i] = mine[held.index(i)] if i in held else None
            of_all = [variables[i] for i in own]
            exchange.count(of_all, layout.widths, route=extended.store.route)
            exchange.traffic.time(tensors, mine)

    def _summand(self, gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        """This worker's summand of the gradient that an owner gets."""
        return gradient

    def _exchange(self, optimizer: Optimizer) -> PartExchange:
        exchange = self._exchanges.get(optimizer)
        if exchange is None:
            extended = self.strategy.extended
            (states,) = extended.worker_state.states_of(optimizer)
            exchange = self._exchanges[optimizer] = PartExchange(
                extended.route,
                extended.bucket_bytes,
                extended.compressors,
                states.within("shares"),
                extended.between_groups,
            )
            traffic = exchange.traffic
            self.strategy.communication.add_source(traffic.traffic, lambda: traffic.seconds)
        return exchange

    def clip(self, optimizer: Optimizer, grads: list[Any], variables: Variables) -> list[Any]:
        places = self._placed(optimizer, variables)
        limit = optimizer.clipnorm or optimizer.global_clipnorm
        if not limit or limit <= 0 or all(place.is_everywhere for place in places):
            found = iter(optimizer._clip_gradients([g for g in grads if g is not None]))
            clipped = [None if g is None else next(found) for g in grads]
            return self._cut_if_dense(grads, clipped, places)
        # Of what is cut, each worker has a part of the squares; rows are on all workers.
        found = self._parts_of_squares(grads, variables, places)
        clipped = sums.clipped_by_norms(optimizer, grads, variables[0].dtype, *found)
        return self._cut_if_dense(grads, clipped, places)

    def _parts_of_squares(
        self, grads: Sequence[Any], variables: Variables, places: Places
    ) -> tuple[list[int], sums.Sums]:
        """Numbers of the gradients whose squares workers add up, and the function that does."""
        return self._parts(grads, places), self._sum_over_parts

    def _parts(self, grads: Sequence[Any], places: Places) -> list[int]:
        """Numbers of the gradients of which each worker has a part, or none."""
        pairs = enumerate(zip(grads, places))
        return [i for i, (g, one) in pairs if not one.is_everywhere and self._is_part(g)]

    def _is_part(self, gradient: Any) -> bool:
        """Whether a gradient of a variable in shares is of this worker's part."""
        return not isinstance(gradient, tf.IndexedSlices)

    def _sum_over_parts(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return sum_packed(self.strategy.extended.sharing_launcher, tensors)

    def _cut_if_dense(self, before: list[Any], clipped: list[Any], places: Places) -> list[Any]:
        """This worker's parts of gradients that were rows until they were clipped."""
        rank = self._rank
        return [
            place.local_part(after, rank)
            if place.cut is not None
            and isinstance(one, tf.IndexedSlices)
            and not isinstance(after, tf.IndexedSlices)
            else after
            for one, after, place in zip(before, clipped, places)
        ]

    def _target(self, variable: keras.Variable, place: Place) -> Any:
        """Variable, or part of one, that an update changes on this worker; or None."""
        if not self._holds(place):
            return None
        return variable if place.cut is None else ParameterPart(variable, place, self._rank)

    def decay(self, optimizer: Optimizer, variables: Variables) -> None:
        pairs = zip(variables, self._placed(optimizer, variables))
        self._targets = {id(v): self._target(v, place) for v, place in pairs}
        with in_update.raised():
            optimizer._apply_weight_decay([t for t in self._targets.values() if t is not None])

    def update(self, optimizer: Optimizer, grads: list[Any], variables: Variables) -> None:
        places = self._placed(optimizer, variables)
        # Nothing decays here of tables on servers.
        targets, self._targets = [self._targets.get(id(v), v) for v in variables], {}
        keeps_nothing = not (self.plan_of(optimizer).has_slots or optimizer.weight_decay)
        mine = []
        for i, (gradient, place) in enumerate(zip(grads, places)):
            if place.cut is not None and isinstance(gradient, tf.IndexedSlices):
                if keeps_nothing and isinstance(targets[i], ParameterPart):
                    # All workers have these rows of a table, which then is not gathered.
                    targets[i] = variables[i]
                else:
                    gradient = sums.part_of_slices(gradient, place.parts, self._rank)
            if targets[i] is not None:
                mine.append((gradient, targets[i]))
        with in_update.raised():
            optimizer._backend_update_step(
                [gradient for gradient, _ in mine],
                [target for _, target in mine],
                optimizer.learning_rate,
            )
        parts = [target for target in targets if isinstance(target, ParameterPart)]
        numbers = [optimizer._get_variable_index(part.variable) for part in parts]
        if parts:
            self._exchange(optimizer).gather(parts, numbers, iterations_of(optimizer))
        self._spread_wholes(optimizer, variables, places, targets)

    def _spread_wholes(
        self, optimizer: Optimizer, variables: Variables, places: Places, targets: list[Any]
    ) -> None:
        """Gives all workers the new values of variables that are whole in an update."""
        extended = self.strategy.extended
        owned = [i for i, place in enumerate(places) if place.owner is not None]
        for own, layout in sums.layouts(variables, places, owned, extended.store.workers):
            values = [self._whole_value(variables[i], targets[i]) for i in own]
            found = layout.gather(extended.store.route, values, extended.store.rank)
            for i, value in zip(own, found):
                variables[i]._value.assign(value, read_value=False)
            of_own, route = [variables[i] for i in own], extended.store.route
            self._exchange(optimizer).count(of_own, layout.widths, is_gradient=False, route=route)
        for variable, place, target in zip(variables, places, targets):
            if place.is_everywhere and isinstance(target, WholeWeight):
                variable._value.assign(target.value())

    def _whole_value(self, variable: keras.Variable, target: Any) -> tf.Tensor:
        """The value that an update has made of a variable on its owner."""
        if not isinstance(variable._value, PartOfWeight):
            return variable._value.read_value()
        return tf.zeros(variable.shape, variable.dtype) if target is None else target.value()

    def _meet(self) -> list[tf.Tensor]:
        """Tensors to wait for those workers by that have parts of the same averages."""
        return self._sum_over_parts([tf.zeros([])]) if self.has_whole_weights else []

    def average(self, optimizer: Optimizer, variables: Variables) -> None:
        places = self._placed(optimizer, variables)
        # Between updates, nothing else waits for a worker that still reads averages, as to save.
        met = self._meet() if optimizer.gradient_accumulation_steps else []
        with in_update.raised(), tf.control_dependencies(met):
            if self.has_whole_weights and all(place.is_everywhere for place in places):
                super().average(optimizer, variables)
                return
            averages = optimizer._model_variables_moving_average
            for variable, place, average in zip(variables, places, averages):
                target = self._target(variable, place)
                if average is None or target is None:
                    continue
                # As Keras computes it; its variable's own `assign` would look at the whole shape.
                is_later = ops.cast(ops.not_equal(optimizer.iterations, 0), variable.dtype)
                kept = is_later * optimizer.ema_momentum
                average._value.assign(kept * average + (1 - kept) * target)


def _call_in_order(function: Callable[[], None], variables: Sequence[ShareVariable]) -> None:
    """Calls a function after earlier reads and writes of some variables in the script."""
    if tf.executing_eagerly():
        function()
    elif variables:
        tf.py_function(lambda *_: function(), [one.handle for one in variables], [])
