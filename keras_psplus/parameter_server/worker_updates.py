"""`updates` on workers: sums of gradients, or rounds of steps that each takes alone."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import (
    averaged_with_weights,
    loss_scale,
    optimizers_of,
    unwrapped,
)
from keras_psplus.core.base.threads import ThreadFlag, ThreadValue
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.log import logger
from keras_psplus.parameter_server import aggregation, pulls, traffic, worker_function
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.extended import ParameterServerExtended
from keras_psplus.parameter_server.pulls import ShardParts, parts_of
from keras_psplus.parameter_server.queue import Closure, Run
from keras_psplus.parameter_server.scheduler import weakly
from keras_psplus.parameter_server.state import WorkerVariable, WorkerVariables
from keras_psplus.parameter_server.step_functions import StepFunctions
from keras_psplus.parameter_server.worker_function import NOTHING_KEPT, current_trace, pack
from keras_psplus.updates import LocalSGD, Updates
from keras_psplus.updates.base import Context, Form

# Gradient accumulation on workers, and the chief's record of it.
#
# Each worker sums the gradients of the batches that it happens to run, and updates when they are
# enough, independently of the others.


# Raised by a thread while an optimizer is given sums, not a batch's gradients.
applying_flag = ThreadFlag()


# Number of rows of the batch whose step is traced, an int or a scalar; None if it has none.
batch_rows: ThreadValue[int | tf.Tensor] = ThreadValue()


class _Unit(NamedTuple):
    """Variables of an optimizer whose gradients are summed together, by name.

    Without the variables, other ones might come to have their ids. With `is_by_rows`, batches count
    by their rows, and a flush updates.
    """

    name: str
    policy: Updates
    forms: list[Form | None]
    variables: list[keras.Variable]
    is_by_rows: bool
    optimizer: weakref.ref[keras.optimizers.Optimizer]


class WorkerUpdates:
    """Gradient accumulation by `updates` or by Keras's `gradient_accumulation_steps`."""

    _LOST = (
        "worker-%d was lost with the gradients of %d batch(es) that it had summed and not sent "
        "yet; they are missing from training"
    )

    def __init__(self, context: StepContext, policy: Updates | None) -> None:
        self.policy = policy
        self._context: Callable[[], Any] = weakref.ref(context)
        self._units = weakref.WeakKeyDictionary[
            keras.optimizers.Optimizer, dict[tuple[int, ...], _Unit]
        ]()
        self._on_all_workers = weakref.WeakKeyDictionary[
            keras.optimizers.Optimizer, tuple[int, Any]
        ]()
        self._finished = weakref.WeakKeyDictionary[keras.optimizers.Optimizer, int]()
        self._pending: dict[int, int] = {}
        self._steps, self._are_steps_counted = 0, True
        # Threads hold the queue.
        context.scheduler.queue.on_lost = weakly(self._note_loss)

    def wrap(self, model: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
        """A model's step as workers take it: on their copies if `updates` is local."""
        return step

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient | None],
        variables: Sequence[keras.Variable],
    ) -> bool:
        """Takes the gradients of a batch, in the function of a worker.

        Returns:
            Whether it has; otherwise the optimizer applies them to its worker's copies.

        Raises:
            ValueError: If the worker has no copies of what the optimizer changes.
        """
        assert self.policy is not None
        # Another worker's update may change the scale between this worker's batches.
        scale = loss_scale(optimizer)
        gradients = [aggregation.over(gradient, scale) for gradient in gradients]
        self.accumulate(
            optimizer,
            self.policy,
            gradients,
            variables,
            lambda means, of: _apply(optimizer, means, of),
            is_by_rows=True,
        )
        return True

    def accumulate(
        self,
        optimizer: keras.optimizers.Optimizer,
        policy: Updates,
        gradients: Sequence[Gradient | None],
        variables: Sequence[keras.Variable],
        apply: Callable[..., Any],
        is_by_rows: bool = False,
    ) -> None:
        """Adds gradients to those that their worker has, and updates if these are enough.

        `apply` makes the update of the mean gradients and the variables. Batches count by their
        rows with `is_by_rows`; otherwise all count alike.
        """
        units = self._units.setdefault(unwrapped(optimizer), {})
        # An optimizer may be given one part of its variables now and another then.
        key = tuple(id(v) for g, v in zip(gradients, variables) if g is not None)
        if key not in units:
            units[key] = _Unit(
                str(len(units)),
                policy,
                duplicate_rows.forms_of(gradients, variables),
                list(variables),
                is_by_rows,
                weakref.ref(optimizer),
            )
        accumulation = self._begin(optimizer, units[key])
        accumulation.on_gradients(_Batch(is_by_rows), gradients, variables, apply)

    def _begin(self, optimizer: keras.optimizers.Optimizer, unit: _Unit) -> Any:
        states = self._context().extended.worker_states
        state = WorkerVariables(states, f"{states.owner(unwrapped(optimizer))}/updates")
        context = Context(state, unit.name, unit.forms, unit.variables)
        accumulation = unit.policy.on_replica(context)
        state.begin()
        self._note(accumulation)
        return accumulation

    def _note(self, part: Any) -> None:
        """Notes a part of the function that is being traced which has a `count`."""
        trace = current_trace()
        if trace is not None:
            trace.kept.append(part)
        else:
            # The steps of a script's own loop are not seen here.
            self._are_steps_counted = False

    def _finisher(self, owner: keras.optimizers.Optimizer) -> tuple[int, Callable[[], None]]:
        """Number of accumulators to flush, and a worker function that flushes them."""
        units = [unit for unit in self._units.get(owner, {}).values() if unit.is_by_rows]
        owner_ref = weakref.ref(owner)

        def finish() -> None:
            for unit in units:
                by = unit.optimizer() or owner_ref()
                accumulation = self._begin(by, unit)
                accumulation.on_finish(None, lambda means, of, by=by: _apply(by, means, of))

        return len(units), finish

    def finish(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Has every worker send what it has, if there may be anything."""
        owner, context = unwrapped(optimizer), self._context()
        context.scheduler.join()
        count, finish = self._finisher(owner)
        is_finished = self._are_steps_counted and self._finished.get(owner) == self._steps
        if not count or is_finished:
            return
        known, functions = self._on_all_workers.get(owner, (0, None))
        if known != count:
            functions = StepFunctions(
                context,
                lambda nothing: finish(),
                lambda trace, results: (tf.zeros([0], tf.float64), (), ()),
                lambda: (),
            )
            self._on_all_workers[owner] = count, functions
        self._run_on_all_workers(context, functions)
        self._finished[owner] = self._steps

    def _run_on_all_workers(self, context: StepContext, functions: StepFunctions) -> None:
        """Has each worker that can be reached run a function, and waits."""
        function, payload = functions([()])

        def done(result: Any, run: Run) -> None:
            _, pending, _ = function.add_costs(result[0], context.totals)
            self.note_pending(pending, run.worker, steps=0)

        for worker in sorted(set(range(context.num_workers)) - context.scheduler.queue.lost):
            arguments = tf.constant(pack(function.variables)), payload
            closure = Closure(function.concrete, arguments, "finishing its updates", done)
            closure.after_loss = "what it was to finish is gone"
            context.scheduler.queue.put(closure, worker)
        context.scheduler.join()

    def training(self, variables: Sequence[keras.Variable]) -> list[keras.optimizers.Optimizer]:
        """The optimizers that train some of these Keras variables, so far as they are known."""
        wanted = {id(variable) for variable in variables}
        return [
            owner
            for owner, units in self._units.items()
            if any(not wanted.isdisjoint(key) for key in units)
        ]

    def note_pending(self, pending: int, worker: int, steps: int = 1) -> None:
        """Notes of how many batches a worker has something left after steps."""
        if pending != NOTHING_KEPT:
            self._steps += steps
            self._pending[worker] = pending

    @property
    def pending(self) -> dict[int, int]:
        """Of how many batches each worker has what it has not sent: a dict."""
        return {worker: count for worker, count in sorted(self._pending.items()) if count}

    def _note_loss(self, worker: int) -> None:
        count = self._pending.pop(worker, 0)
        if count:
            logger.warning(self._LOST, worker, count)


class _Batch:
    """Weight of a batch: its rows, or 1."""

    def __init__(self, is_by_rows: bool) -> None:
        self._rows = batch_rows() if is_by_rows else None

    def rows(self) -> tuple[Any, Any]:
        rows = 1 if self._rows is None else self._rows
        return rows, rows


def _apply(
    optimizer: keras.optimizers.Optimizer,
    means: Iterable[Gradient | None],
    variables: Sequence[keras.Variable],
) -> None:
    scale = loss_scale(optimizer)
    means = [aggregation.times(mean, scale) for mean in means]
    with applying_flag.raised():
        optimizer.apply(means, variables)


# Rounds of steps that a worker takes alone, on copies of an optimizer's variables.
#
# A round begins by reading the variables. Its steps change copies, on the worker. It ends by
# sending what has changed, over the number of workers: what the workers send in the same time adds
# up to the mean of their changes, as if they had averaged.


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
        arrived = worker_function.send_coalesced(values, [target.device for target in targets])
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
