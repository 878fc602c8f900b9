"""Schedules of optimizers' communication by a strategy's `updates=`, and their state."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from keras_psplus.core.base.optimizers import (
    averaged_with_weights,
    unwrapped,
    variables_of_apply,
)
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.batch import replica_step as step_module
from keras_psplus.updates.base import Context

if TYPE_CHECKING:
    import keras

    from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
    from keras_psplus.updates import Updates

# Weak reference to the optimizer that states belong to.
_Owner: TypeAlias = Callable[[], Any]


class MirroredUpdates:
    """Takes the gradients of all optimizers, and has them applied when it is time."""

    def __init__(self, policy: Updates, strategy: tf.distribute.Strategy) -> None:
        self.policy = policy
        self._strategy: Callable[[], Any] = weakref.ref(strategy)
        self._of_owner: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, _OptimizerState] = (
            weakref.WeakKeyDictionary()
        )

    def take(
        self,
        step: step_module.ReplicaStep,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices | None],
        trainable_variables: list[keras.Variable] | None,
        original: Callable[..., Any],
    ) -> Any:
        """Takes the gradients of one batch, in replica context; `original` is Keras's `apply`."""
        variables = variables_of_apply(optimizer, self.policy, grads, trainable_variables)
        if variables is None:
            return original(optimizer, grads, trainable_variables)
        self.prepare(optimizer, optimizer._trainable_variables)
        averaged = averaged_with_weights(unwrapped(optimizer), self.policy, variables)
        state = self._state_of(optimizer)
        state.optimizer = weakref.ref(optimizer)
        replica = tf.distribute.get_replica_context()._replica_id
        units, states = state.units[replica], state.states[replica]
        # An optimizer may be given one part of its variables now and another then.
        key = tuple(id(v) for g, v in zip(grads, variables) if g is not None)
        if key not in units:
            name = str(len(units))
            sums = functools.partial(self._sums, weakref.ref(unwrapped(optimizer)))
            parts = self._parts(optimizer, grads, variables)
            group_sums = None
            if self._strategy().extended.levels is not None:
                group_sums = functools.partial(self._group_sums, weakref.ref(unwrapped(optimizer)))
            forms = duplicate_rows.forms_of(grads, variables)
            context = Context(states, name, forms, variables, parts, averaged, sums, group_sums)
            units[key] = self.policy.on_replica(context)
        units[key].on_gradients(step, grads, variables, lambda g, v: original(optimizer, g, v))
        return None

    def prepare(
        self, optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
    ) -> None:
        """Has the rule divide an optimizer's variables, before the first step.

        Args:
            variables: All Keras variables that it will be given.
        """
        if not self.policy.local or self._state_of(optimizer).parts is not None:
            return
        if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
            # A loop of the script's own has begun without it.
            tf.distribute.get_replica_context().merge_call(
                lambda strategy: self._build(self._state_of(optimizer), variables)
            )
        else:
            self._build(self._state_of(optimizer), variables)

    def _build(self, state: _OptimizerState, variables: list[keras.Variable]) -> None:
        with self._strategy().scope():
            state.parts = self.policy.on_build(variables)
        self._strategy().extended.worker_state.claim(state.owner())

    def finish(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Has everything applied that is still to be; on all workers."""
        state = self._state_of(optimizer)
        if optimizer is not unwrapped(optimizer):
            # The model may have been compiled again, with another loss scale.
            state.optimizer = weakref.ref(optimizer)
        number = len(state.units[0])
        if number and state.finish[0] != (number, state.optimizer):

            def finish_replica() -> None:
                step: Any = step_module.current_step()
                # Or the optimizer would hand the gradients to us again.
                step.recording = False
                replica = tf.distribute.get_replica_context()._replica_id
                for unit in state.units[replica].values():
                    unit.on_finish(step, state.optimizer().apply)

            run = self._strategy().run
            state.finish = (
                (number, state.optimizer),
                tf.function(lambda: run(finish_replica), autograph=False),
            )
        if number:
            state.finish[1]()

    def training(self, variables: Iterable[keras.Variable]) -> list[keras.optimizers.Optimizer]:
        """The optimizers that have been given gradients of some of these Keras variables."""
        wanted = {id(variable) for variable in variables}
        return [
            owner
            for owner, state in self._of_owner.items()
            if any(not wanted.isdisjoint(key) for key in state.units[0])
        ]

    def batches(self, optimizer: keras.optimizers.Optimizer) -> int:
        """Number of batches whose gradients wait for an update."""
        return sum(unit.batches for unit in self._state_of(optimizer).units[0].values())

    def momenta(self, owner: keras.optimizers.Optimizer, replica: int) -> dict[str, tf.Variable]:
        """A local replica's variables of an optimizer and of outer ones, if it steps alone."""
        if not self.policy.local:
            return {}
        outers = [outer for _, outer in self._state_of(owner).parts or () if outer is not None]
        variables = [v for one in (owner, *outers) for v in one.variables]
        local = self._strategy().experimental_local_results
        return {f"momenta/{j}": local(v.value)[replica] for j, v in enumerate(variables)}

    def _parts(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[tuple[Any, Any]]:
        """The rule's parts of the variables, without those that have no gradient."""
        trained = {id(v) for g, v in zip(grads, variables) if g is not None}
        parts = self._state_of(optimizer).parts or ()
        return [([v for v in part if id(v) in trained], outer) for part, outer in parts]

    def _sums(
        self,
        owner: _Owner,
        tensors: Sequence[tf.Tensor],
        variables: Sequence[Any],
        turn: tf.Tensor,
        compress: bool,
    ) -> list[tf.Tensor]:
        kind = "change" if compress else "copy"
        reducers = self._strategy().extended.reducers
        return reducers.sum(tensors, variables, turn, owner(), kind)

    def _group_sums(
        self, owner: _Owner, tensors: list[tf.Tensor], variables: list[Any], turn: tf.Tensor
    ) -> list[tf.Tensor]:
        reducers = self._strategy().extended.reducers
        return reducers.sum(tensors, variables, turn, owner(), "group")

    def _state_of(self, optimizer: keras.optimizers.Optimizer) -> _OptimizerState:
        owner = unwrapped(optimizer)
        if owner not in self._of_owner:
            states = self._strategy().extended.worker_state.states_of(owner)
            self._of_owner[owner] = _OptimizerState(owner, [s.within("updates") for s in states])
        return self._of_owner[owner]


class _OptimizerState:
    """State of one optimizer: its units and their variables."""

    def __init__(self, owner: keras.optimizers.Optimizer, states: Sequence[ReplicaStates]) -> None:
        self.owner, self.states = weakref.ref(owner), states
        self.units: list[dict[Any, Any]] = [{} for _ in states]
        self.optimizer: Any = None
        self.finish: tuple[Any, Any] = None, None
        # What `on_build` has returned.
        self.parts: Any = None
