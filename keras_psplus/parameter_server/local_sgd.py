"""Rounds of steps that a worker takes alone, on copies of an optimizer's variables.

A round begins by reading the variables. Its steps change copies, on the worker. It ends by sending
what has changed, over the number of workers: what the workers send in the same time adds up to the
mean of their changes, as if they had averaged.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import averaged_with_weights, optimizers_of, unwrapped
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.extended import ParameterServerExtended
from keras_psplus.parameter_server.state import WorkerVariable, WorkerVariables
from keras_psplus.parameter_server.tracing import remote, traffic, worker_function
from keras_psplus.parameter_server.transport import aggregation, pulls
from keras_psplus.parameter_server.transport.pulls import parts_of
from keras_psplus.parameter_server.transport.sharded import ShardParts
from keras_psplus.parameter_server.worker_updates import WorkerUpdates
from keras_psplus.updates import LocalSGD, Updates


class LocalSGDVariables(NamedTuple):
    """TensorFlow's variables of one optimizer, by what becomes of them.

    Attributes:
        weights: What it trains: read when a round begins; changes are sent, compressed.
        averages: Moving averages and the like: the same, but as they are.
        slots: Each worker keeps its own.
        counters: Read when a round begins; what is added to them is added for all.
    """

    weights: list[tf.Variable]
    averages: list[tf.Variable]
    slots: list[tf.Variable]
    counters: list[tf.Variable]


@dataclasses.dataclass(eq=False)
class LocalSGDRounds:
    """The rounds of one optimizer, whose constraints `constrain` has its weights satisfy."""

    extended: ParameterServerExtended
    num_workers: int
    policy: LocalSGD
    optimizer: weakref.ref[keras.optimizers.Optimizer]
    variables: LocalSGDVariables
    constrain: Callable[[], None]

    def names(self, kind: str) -> WorkerVariables:
        """A maker of variables, of this optimizer's own."""
        states = self.extended.worker_states
        return WorkerVariables(states, f"{states.owner(self.optimizer())}/{kind}")


class LocalSGDRound:
    """The present round, begun, of the worker that runs the function which is being traced."""

    def __init__(self, rounds: LocalSGDRounds) -> None:
        self._rounds, self._variables = rounds, rounds.variables
        pulled = [*self._variables.weights, *self._variables.averages, *self._variables.counters]
        # All workers read them again after a restart.
        copies = rounds.names("local")
        copies.is_saved = False
        self._count = copies.variable("count", [], tf.int64)
        self._copies = {id(v): _like(v, copies, f"copy {i}") for i, v in enumerate(pulled)}
        self._anchors = {id(v): _like(v, copies, f"anchor {i}") for i, v in enumerate(pulled)}
        copies.begin()
        if self._variables.slots:
            slots = rounds.names("slots")
            for i, slot in enumerate(self._variables.slots):
                self._copies[id(slot)] = _like(slot, slots, f"{i}")
            # As the model's file has them.
            slots.begin(
                lambda: self._pull(self._variables.slots, [None] * len(self._variables.slots))
            )
        tf.cond(self.count > 0, lambda: None, self._begin)

    @property
    def count(self) -> tf.Tensor:
        """Steps since the round began, a tensor."""
        return self._count.read_value()

    def handles(self) -> dict[int, tf.Tensor]:
        """Dict from ids of variables to the handles of the worker's copies."""
        own = self._variables
        handles = {}
        for variables in (own.weights, own.averages, own.slots, own.counters):
            for variable in variables:
                for part, copy in zip(pulls.parts_of(variable), self._copies[id(variable)]):
                    handles[id(part)] = copy.handle
        return handles

    def _begin(self) -> None:
        own = self._variables
        compressors = [self._rounds.extended.compressors.of_value(v) for v in own.weights]
        others = [*own.averages, *own.counters]
        pulled = [*own.weights, *others]
        self._pull(pulled, [*compressors, *[None] * len(others)])
        for variable in pulled:
            for copy, anchor in zip(self._copies[id(variable)], self._anchors[id(variable)]):
                anchor.assign(copy.read_value())

    def _pull(self, variables: Sequence[tf.Variable], compressors: Sequence[Any]) -> None:
        """Reads variables into their copies; small ones of one server come together."""
        asked = [
            (part, compressor, pulls.key_of(variable, compressor), copy)
            for variable, compressor in zip(variables, compressors)
            for part, copy in zip(pulls.parts_of(variable), self._copies[id(variable)])
        ]
        for places in pulls.groups([part for part, *_ in asked]):
            parts, compressors, keys, copies = zip(*(asked[place] for place in places))
            for copy, value in zip(copies, pulls.read_together(parts, compressors, keys)):
                copy.assign(value)

    def step(self) -> None:
        """Counts a step; ends the round after the last one."""
        self._count.assign_add(1)
        policy, every = self._rounds.policy, self._rounds.policy.every
        if policy.start_step and self._variables.counters:
            (steps, *_) = self._copies[id(self._variables.counters[0])]
            every = tf.where(steps.read_value() <= policy.start_step, 1, every)
        tf.cond(self.count >= tf.cast(every, tf.int64), self._push, lambda: None)

    def finish(self) -> None:
        """Ends the round, and shows the servers the worker's slots."""
        tf.cond(self.count > 0, self._push, lambda: None)
        slots = self._variables.slots
        targets = [part for slot in slots for part in pulls.parts_of(slot)]
        values = [copy.read_value() for slot in slots for copy in self._copies[id(slot)]]
        arrived = remote.send_coalesced(values, [target.device for target in targets])
        for target, value in zip(targets, arrived):
            with tf.device(target.device):
                change = (value - pulls.raw_read(target)) / self._rounds.num_workers
                target.assign_add(change, read_value=False)

    def _push(self) -> None:
        own, extended = self._variables, self._rounds.extended
        scale = 1.0 / self._rounds.num_workers
        sent: list[tf.Tensor] = []
        with traffic.timing_push(sent):
            for variables, compressed in ((own.weights, True), (own.averages, False)):
                changes = [self._change(variable) for variable in variables]
                changes = [change * tf.cast(scale, change.dtype) for change in changes]
                sent += changes
                for change, variable in extended.pushes.send(
                    changes, variables, self._number, self._rounds.optimizer(), compressed
                ):
                    _add(change, variable)
            for counter in own.counters:
                _add(self._change(counter), counter)
        self._rounds.constrain()
        self._count.assign(0)

    def _number(self) -> tf.Tensor:
        (anchor,) = self._anchors[id(self._variables.counters[0])]
        return anchor.read_value()

    def _change(self, variable: tf.Variable) -> tf.Tensor:
        parts = [
            copy.read_value() - anchor.read_value()
            for copy, anchor in zip(self._copies[id(variable)], self._anchors[id(variable)])
        ]
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _like(variable: tf.Variable, maker: WorkerVariables, name: str) -> list[WorkerVariable]:
    return [
        maker.variable(f"{name} part {i}", part.shape, part.dtype)
        for i, part in enumerate(pulls.parts_of(variable))
    ]


def _add(change: Any, variable: tf.Variable) -> None:
    parts = change if isinstance(change, ShardParts) else [change]
    for part, target in zip(parts, pulls.parts_of(variable), strict=True):
        with tf.device(target.device):
            target.assign_add(part, read_value=False)


# Workers that step alone, and what the chief knows of them.


class LocalSGDUpdates(WorkerUpdates):
    """`updates.LocalSGD`: each worker takes steps alone, and sends what they have changed."""

    policy: LocalSGD
    _LOST = (
        "worker-%d was lost with %d step(s) that it had taken alone and not sent yet; they are "
        "missing from training"
    )

    def __init__(self, context: StepContext, policy: LocalSGD) -> None:
        super().__init__(context, policy)
        self._rounds = weakref.WeakKeyDictionary[keras.optimizers.Optimizer, LocalSGDRounds]()

    def wrap(self, model: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
        def step_alone(batch: Any) -> Any:
            seen: set[int] = set()
            optimizers = [one for one in optimizers_of(model).values() if one.built]
            rounds = [LocalSGDRound(self._rounds_of(one, seen)) for one in optimizers]
            handles: dict[int, tf.Tensor] = {}
            for one in rounds:
                self._note(one)
                handles |= one.handles()
            with worker_function.handles.being(handles):
                logs = step(batch)
            for one in rounds:
                one.step()
            return logs

        return step_alone

    def _rounds_of(self, optimizer: keras.optimizers.Optimizer, seen: set[int]) -> LocalSGDRounds:
        variables = _variables_of(optimizer, self.policy, seen)
        if optimizer not in self._rounds:
            context = self._context()
            known = {id(weight) for weight in variables.weights}
            constraints = [
                (variable, variable.constraint)
                for variable in optimizer._trainable_variables
                if variable.constraint is not None and id(variable._value) in known
            ]
            self._rounds[optimizer] = LocalSGDRounds(
                context.extended,
                context.num_workers,
                self.policy,
                weakref.ref(optimizer),
                variables,
                # A mean of weights that satisfy a constraint need not.
                lambda: aggregation.constrain(context.strategy, constraints),
            )
        return self._rounds[optimizer]

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient | None],
        variables: Sequence[keras.Variable],
    ) -> bool:
        for variable in [*variables, unwrapped(optimizer)._iterations]:
            if worker_function.handle_of(parts_of(variable._value)[0]) is None:
                raise ValueError(
                    "With `updates=LocalSGD(...)` under parameter servers, an optimizer has to be "
                    "an attribute of the model, built before the first step, and applied by the "
                    "`train_step` of `fit`: its variables are copied to the workers. "
                    f"Received: {optimizer.name} and the variable '{variable.path}'"
                )
        return False

    def _finisher(self, owner: keras.optimizers.Optimizer) -> tuple[int, Callable[[], None]]:
        rounds = self._rounds.get(owner)

        def finish() -> None:
            assert rounds is not None
            one = LocalSGDRound(rounds)
            self._note(one)
            one.finish()

        return int(rounds is not None), finish

    def training(self, variables: Sequence[keras.Variable]) -> list[keras.optimizers.Optimizer]:
        wanted = {id(variable._value) for variable in variables}
        return [
            optimizer
            for optimizer, rounds in self._rounds.items()
            if any(id(weight) in wanted for weight in rounds.variables.weights)
        ]


def _variables_of(
    optimizer: keras.optimizers.Optimizer, policy: Updates, seen: set[int]
) -> LocalSGDVariables:
    # A weight that two optimizers change has one copy.
    weights = [v for v in optimizer._trainable_variables if id(v) not in seen]
    seen.update(id(variable) for variable in weights)
    sums = optimizer._accumulated_gradients if optimizer.gradient_accumulation_steps else []
    averaged = averaged_with_weights(optimizer, policy, optimizer._trainable_variables)
    averages = [v for v in averaged if v is not None and all(v is not one for one in sums)]
    others = [*averages, *sums, optimizer._iterations]
    slots = [
        variable
        for variable in optimizer.variables
        if variable.value.dtype.is_floating
        and variable.name != "learning_rate"
        and all(variable is not other for other in others)
    ]
    kinds = weights, averages, slots, [optimizer._iterations]
    return LocalSGDVariables(*([variable._value for variable in kind] for kind in kinds))
