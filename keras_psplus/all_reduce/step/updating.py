"""Schedules of optimizers' communication by a strategy's `updates=`, and their state."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import tensorflow as tf

from keras_psplus.core.base.optimizers import (
    averaged_with_weights,
    optimizers_of,
    unwrapped,
    variables_of_apply,
)
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.batch import replica_step as step_module
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.log import warn_once
from keras_psplus.tf_internals.composite_variable import own_copy
from keras_psplus.updates.base import Context

if TYPE_CHECKING:
    import keras

    from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
    from keras_psplus.updates import Updates


# Keras's accumulated gradients: each replica's own while it trains, their sum where they are seen.
#
# With `gradient_accumulation_steps` nothing is sent between updates, so that each replica has its
# own sums. A file, a backup or a callback has to see those of the global batch, and another number
# of workers has to be able to go on with them:
#
#     global      all replicas hold the sum over all of them: when they are new, when they have been
#                 read from a file, and once `make_global` has summed them
#     a step      leaves what is global to the first replica, zeros to the others, and each adds its
#                 own: the sum over all of them is what one process has


class Accumulators:
    """The accumulated gradients of all optimizers of a strategy."""

    def __init__(
        self, strategy: tf.distribute.Strategy, sum_all: Callable[..., list[tf.Tensor]]
    ) -> None:
        self._strategy: Callable[[], Any] = weakref.ref(strategy)
        self._sum_all = sum_all
        self._of_optimizer: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, _State] = (
            weakref.WeakKeyDictionary()
        )

    def begin_step(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Leaves what is global to the first replica, in replica context."""
        extended = self._strategy().extended
        device, rank = extended.device_in_context(), extended.rank_in_context()
        is_global = self._of_optimizer.setdefault(optimizer, _State()).flag(device)

        def leave() -> None:
            for variable in _accumulators(optimizer) if rank else ():
                own = own_copy(variable._value)
                own.assign(tf.zeros(own.shape, own.dtype), read_value=False)
            is_global.assign(False, read_value=False)

        tf.cond(is_global.read_value(), leave, lambda: None)

    def make_global(self, model: keras.Model) -> None:
        """Gives all replicas the sums over all of them; on all workers, between steps."""
        wanted = {id(variable) for variable in model.trainable_variables}
        for optimizer, state in list(self._of_optimizer.items()):
            if wanted.isdisjoint(id(variable) for variable in optimizer._trainable_variables):
                continue
            batches = int(optimizer._iterations.numpy())
            # All workers come here after the same batches, so that they skip it alike.
            if batches % optimizer.gradient_accumulation_steps and state.summed_at != batches:
                self._sum(optimizer, state)
                state.summed_at = batches

    def note_assigned(self, variables: Iterable[keras.Variable]) -> None:
        """Hears that variables were given global values, as from a file, between steps."""
        assigned = {id(variable) for variable in variables}
        for optimizer, state in self._of_optimizer.items():
            if not assigned.isdisjoint(map(id, _accumulators(optimizer))):
                state.set_global()

    def warn_if_partial(self, model: keras.Model) -> None:
        """Says what a file lacks that a worker writes now, without asking the others."""
        for optimizer in optimizers_of(model).values():
            steps = optimizer.gradient_accumulation_steps
            if steps and not self._are_global(optimizer, steps):
                warn_once(
                    "%s is saved in the middle of gradient_accumulation_steps: the file holds the "
                    "gradients that this worker has accumulated, without those of the others. Its "
                    "weights are whole. Save it by ModelCheckpoint or BackupAndRestore on all "
                    "workers, at the end of an epoch, or after an update. Received: "
                    "gradient_accumulation_steps=%d",
                    model.name,
                    steps,
                )

    def _are_global(self, optimizer: keras.optimizers.Optimizer, steps: int) -> bool:
        state = self._of_optimizer.get(optimizer)
        if state is None or int(optimizer._iterations.numpy()) % steps == 0:
            return True
        return all(flag.numpy() for flag in state.flags.values())

    def _sum(self, optimizer: keras.optimizers.Optimizer, state: _State) -> None:
        strategy, variables = self._strategy(), _accumulators(optimizer)

        def sum_on_replica() -> None:
            extended = strategy.extended
            is_global = state.flag(extended.device_in_context()).read_value()
            counts = tf.logical_or(not extended.rank_in_context(), tf.logical_not(is_global))
            copies = [own_copy(variable._value) for variable in variables]
            parts = [tf.where(counts, v.read_value(), tf.zeros(v.shape, v.dtype)) for v in copies]
            for variable, total in zip(copies, self._sum_all(parts, variables, None)):
                variable.assign(total, read_value=False)

        tf.function(lambda: strategy.run(sum_on_replica), autograph=False)()
        state.set_global()


class _State:
    """Whether an optimizer's accumulators are global, on each local replica.

    Attributes:
        flags: Dict from the replicas' devices to variables.
        summed_at: The number of batches after which they were last summed.
    """

    def __init__(self) -> None:
        self.flags: dict[str, Any] = {}
        self.summed_at: int | None = None

    def flag(self, device: str) -> Any:
        if device not in self.flags:
            self.flags[device] = made_outside(lambda: True, device)
        return self.flags[device]

    def set_global(self) -> None:
        for flag in self.flags.values():
            flag.assign(True)


def _accumulators(optimizer: Any) -> Sequence[keras.Variable]:
    # Variables that take their gradient as a value have none.
    return [variable for variable in optimizer._accumulated_gradients if variable is not None]


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
        """Has the rule divide an optimizer's variables, before the first step."""
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
    def __init__(self, owner: keras.optimizers.Optimizer, states: Sequence[ReplicaStates]) -> None:
        self.owner, self.states = weakref.ref(owner), states
        self.units: list[dict[Any, Any]] = [{} for _ in states]
        self.optimizer: Any = None
        self.finish: tuple[Any, Any] = None, None
        # Returned by `on_build`.
        self.parts: Any = None
