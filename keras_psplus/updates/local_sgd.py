"""Local SGD and DiLoCo: workers train alone, and average weights every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_psplus.arguments import flag, number, shown, whole_number
from keras_psplus.tf_internals.composite_variable import own_copy
from keras_psplus.updates.base import (
    Apply,
    Context,
    Grads,
    ReplicaUpdates,
    States,
    Step,
    Updates,
    map_values,
)

# Steps of each worker alone, and averages of their weights from time to time.

# A count by which the host chooses what a replica's step does.

_HOST = "CPU:0"


class HostCount:
    """An int64 of a replica's own, kept and compared on the host.

    On a GPU, each comparison would have the host wait for it.
    """

    def __init__(self, states: States, name: str) -> None:
        self._variable = states.variable(name, [], tf.int64, on_host=True)

    def read(self) -> tf.Tensor:
        return self._variable.read_value()

    def satisfies(self, condition: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Whether the count satisfies a condition, a predicate of `tf.cond`."""
        with tf.device(_HOST):
            return condition(self.read())

    def update(self, function: Callable[[tf.Tensor], tf.Tensor]) -> None:
        with tf.device(_HOST):
            self._variable.assign(function(self.read()), read_value=False)

    def add_one(self) -> None:
        with tf.device(_HOST):
            self._variable.assign_add(1, read_value=False)

    def set(self, value: int) -> None:
        with tf.device(_HOST):
            self._variable.assign(value, read_value=False)


# Some of the variables, whose changes are averaged over replicas at the same time.


class LocalPolicy(Protocol):
    """Numbers of a rule by which replicas step alone: `LocalSGD` or `DiLoCo`."""

    every: int
    start_step: int
    fragments: int
    overlap_steps: int
    alpha: float


class Fragment:
    """Averages what one replica's variables have changed by, and steps along the mean.

    Args:
        name: What tells it from others of the same optimizer.
        outer: Outer optimizer, or None to take the mean as it is.
        sums: Function of tensors, Keras variables, a round and whether to compress, that sums
            over replicas.

    Attributes:
        averaged: Further variables, which are averaged as they are.
    """

    def __init__(
        self,
        policy: LocalPolicy,
        states: States,
        name: str,
        variables: list[keras.Variable],
        outer: keras.optimizers.Optimizer | None,
        sums: Callable[..., list[tf.Tensor]],
    ) -> None:
        self._variables, self._outer, self._sums = variables, outer, sums
        self._overlap, self._alpha = policy.overlap_steps, policy.alpha
        self.averaged: Sequence[keras.Variable] = []
        self._round = states.variable(f"{name} round", [], tf.int64)
        # Rows of this replica and of all, since the last round.
        self._seen = states.variable(f"{name} rows", [2], tf.float64)
        self._weight = states.variable(f"{name} weight", [], tf.float64)
        self._anchors = self._like_variables(states, f"{name} anchor")
        if self._overlap:
            # 0, or 1 and the steps since what is under way was set aside.
            self._under_way = HostCount(states, f"{name} under way")
            self._aside = self._like_variables(states, f"{name} aside")
            self._parts = _by_size(variables, self._overlap)

    def _like_variables(self, states: States, name: str) -> list[Any]:
        return [
            states.variable(f"{name} {i}", v.shape, tf.as_dtype(v.dtype))
            for i, v in enumerate(self._variables)
        ]

    def mark(self) -> None:
        """Notes the weights from which the replica sets out, the same on all."""
        for anchor, variable in zip(self._anchors, self._variables):
            anchor.assign(own_copy(variable.value).read_value(), read_value=False)

    def see(self, rows: Sequence[tf.Tensor]) -> None:
        """Notes that the replica has made a step on its rows of so many."""
        self._seen.assign_add(tf.cast(tf.stack(rows), tf.float64), read_value=False)

    def send(self, step: Step) -> None:
        """Averages the changes; with an overlap, sets them aside for the next steps to send."""
        changes = self._changes()
        if not self._overlap:
            self._arrive(step, self._summed(changes, range(len(changes))), self._alpha)
            return
        for aside, change in zip(self._aside, changes):
            aside.assign(change, read_value=False)
        self._under_way.set(1)

    def send_part(self) -> None:
        """Sends the next part of the pending change, if one is due."""
        for i, part in enumerate(self._parts if self._overlap else ()):
            self._send_if(i + 1, i + 1, part)

    def receive(self, step: Step) -> None:
        """After the last of the overlapping steps, takes what has been sent."""
        if not self._overlap:
            return
        arrives = self._under_way.satisfies(lambda steps: steps >= self._overlap)
        self._under_way.update(lambda steps: tf.where(steps > 0, steps + 1, 0))
        tf.cond(arrives, lambda: self._arrive_from_aside(step), lambda: None)

    def finish(self, step: Step) -> None:
        """Averages all that there is, after which all replicas have the same weights."""
        if self._overlap:
            for i, part in enumerate(self._parts):
                self._send_if(1, i + 1, part)
            is_under_way = self._under_way.satisfies(lambda steps: steps > 0)
            tf.cond(is_under_way, lambda: self._arrive_from_aside(step), lambda: None)

        def average() -> None:
            changes = self._changes()
            self._arrive(step, self._summed(changes, range(len(changes))), 0.0)

        tf.cond(self._seen.read_value()[1] > 0, average, self._take_anchors)

    def _take_anchors(self) -> None:
        if self._alpha:
            for anchor, variable in zip(self._anchors, self._variables):
                own_copy(variable.value).assign(anchor.read_value(), read_value=False)

    def _send_if(self, first: int, last: int, places: Sequence[int]) -> None:
        """Sends some changes if a step from the first to the last one is taken."""

        def send() -> None:
            sums = self._summed([self._aside[i].read_value() for i in places], places)
            for i, total in zip(places, sums):
                self._aside[i].assign(total, read_value=False)

        if places:
            is_due = self._under_way.satisfies(lambda steps: (steps >= first) & (steps <= last))
            tf.cond(is_due, send, lambda: None)

    def _summed(self, tensors: list[tf.Tensor], places: Sequence[int]) -> list[tf.Tensor]:
        variables = [self._variables[i] for i in places]
        return self._sums(tensors, variables, self._round.read_value(), True)

    def _changes(self) -> list[tf.Tensor]:
        """Change since the last anchor, weighted by the rows that the replica has seen."""
        seen = self._seen.read_value()
        weight = tf.math.divide_no_nan(seen[0], seen[1])
        self._weight.assign(weight, read_value=False)
        self._seen.assign(tf.zeros_like(self._seen), read_value=False)
        return [
            (anchor.read_value() - own_copy(variable.value).read_value())
            * tf.cast(weight, anchor.dtype)
            for anchor, variable in zip(self._anchors, self._variables)
        ]

    def _arrive_from_aside(self, step: Step) -> None:
        self._arrive(step, [aside.read_value() for aside in self._aside], self._alpha)
        self._under_way.set(0)

    def _arrive(self, step: Step, gradients: Sequence[tf.Tensor], alpha: float) -> None:
        """Steps from the anchors, and sets out from there."""
        own = [own_copy(variable.value) for variable in self._variables]
        before = [one.read_value() for one in own]
        if self._outer is None:
            for one, anchor, gradient in zip(own, self._anchors, gradients):
                one.assign(anchor.read_value() - gradient, read_value=False)
            for variable in self._variables:
                # A mean of weights that satisfy a constraint need not.
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable))
        else:
            for one, anchor in zip(own, self._anchors):
                one.assign(anchor.read_value(), read_value=False)
            with step.applying_alone():
                self._outer.apply(gradients, self._variables)
        self.mark()
        if alpha:
            for one, old in zip(own, before):
                one.assign(alpha * old + (1.0 - alpha) * one.read_value(), read_value=False)
        self._average()
        self._round.assign_add(1, read_value=False)

    def _average(self) -> None:
        if not self.averaged:
            return
        own = [own_copy(variable.value) for variable in self.averaged]
        weight = self._weight.read_value()
        parts = [one.read_value() * tf.cast(weight, one.dtype) for one in own]
        for one, mean in zip(
            own, self._sums(parts, self.averaged, self._round.read_value(), False)
        ):
            one.assign(mean, read_value=False)


def assign_to_fragments(
    variables: Sequence[keras.Variable], number: int
) -> list[list[keras.Variable]]:
    """Divides variables into fragments of about equal size."""
    fragments: list[list[keras.Variable]] = [[] for _ in range(number)]
    sizes = [0] * number
    # The largest first, each to the fragment that is smallest by then.
    for variable in sorted(variables, key=_size, reverse=True):
        smallest = sizes.index(min(sizes))
        fragments[smallest].append(variable)
        sizes[smallest] += _size(variable)
    return fragments


def _size(variable: keras.Variable) -> int:
    return int(variable.value.shape.num_elements())


def _by_size(variables: Sequence[keras.Variable], count: int) -> list[list[int]]:
    """Places of variables in so many consecutive parts of about the same size, some empty."""
    parts: list[list[int]] = [[] for _ in range(count)]
    before = 0
    total = max(1, sum(variable.value.shape.num_elements() for variable in variables))
    for i, variable in enumerate(variables):
        size = variable.value.shape.num_elements()
        parts[min(count - 1, int(count * (before + size / 2) / total))].append(i)
        before += size
    return parts


# One replica's steps alone, and what makes its weights those of all replicas again.


class LocalSteps(ReplicaUpdates):
    """Applies a replica's own gradients of some variables, and has fragments of them averaged.

    Args:
        context: `base.Context`, whose parts are the fragments.
    """

    def __init__(self, policy: LocalPolicy, context: Context) -> None:
        states, name, _, _, parts, averaged, sums, self._group_sums = context
        assert sums is not None, "an engine gives it to each rule that averages weights"
        self._policy = policy
        self._count = HostCount(states, f"{name} count")
        self._batches = HostCount(states, f"{name} batches")
        self._fragments = [
            Fragment(policy, states, f"{name} fragment {i}", variables, outer, sums)
            for i, (variables, outer) in enumerate(parts)
        ]
        # With the last one's weights: once in each round.
        self._fragments[-1].averaged = averaged

    def on_gradients(
        self, step: Step, grads: Grads, variables: Sequence[keras.Variable], apply: Apply
    ) -> None:
        start = self._policy.start_step
        if not start:
            self._alone(step, grads, variables, apply)
            return
        early = self._batches.satisfies(lambda batches: batches < start)
        self._batches.add_one()
        tf.cond(
            early,
            lambda: apply(grads, variables),
            lambda: self._alone(step, grads, variables, apply),
        )

    def on_finish(self, step: Step, apply: Apply) -> None:
        def finish() -> None:
            for fragment in self._fragments:
                fragment.finish(step)
            self._count.set(0)

        tf.cond(self._count.satisfies(lambda count: count > 0), finish, lambda: None)

    def _alone(
        self, step: Step, grads: Grads, variables: Sequence[keras.Variable], apply: Apply
    ) -> None:
        every, fragments = self._policy.every, self._fragments
        first = self._count.satisfies(lambda count: tf.equal(count, 0))
        for fragment in fragments:
            tf.cond(first, fragment.mark, lambda: None)
            # Reads nothing of this step: it travels while the step is computed.
            fragment.send_part()
        grads = self._of_own_rows(step, grads, variables)
        with step.applying_alone():
            apply(grads, variables)
        rows = step.rows()
        for fragment in fragments:
            fragment.see(rows)
            fragment.receive(step)
        self._count.add_one()
        for i, fragment in enumerate(fragments):
            turn = (i + 1) * every // self._policy.fragments % every
            tf.cond(
                self._is_turn(turn), lambda fragment=fragment: fragment.send(step), lambda: None
            )

    def _is_turn(self, turn: int) -> tf.Tensor:
        every = self._policy.every
        return self._count.satisfies(lambda count: tf.equal(tf.math.floormod(count, every), turn))

    def _of_own_rows(
        self, step: Step, grads: Grads, variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """The gradients of the mean over the replica's own rows; with groups, over its group's."""
        if self._group_sums is None:
            return [map_values(step.unscale_by_batch_fraction, gradient) for gradient in grads]
        given, turn = [i for i, g in enumerate(grads) if g is not None], self._count.read()
        sums = self._group_sums([grads[i] for i in given], [variables[i] for i in given], turn)
        fraction = step.sum_over_group([step.batch_fraction()])[0]
        grads = list(grads)
        for i, total in zip(given, sums):
            grads[i] = map_values(
                lambda value: tf.math.divide_no_nan(value, tf.cast(fraction, value.dtype)), total
            )
        return grads


class LocalSGD(Updates):
    """Each worker steps alone; every some steps, weights are averaged over the workers.

    A worker's weights count in the average by the rows that it has trained on since the last one.

    Args:
        every: Steps between two averages.
        start_step: Before this step gradients are averaged at every step, as without `updates`
            (post-local SGD).
        average_slots: Whether the optimizer's momenta and the like are averaged as well. Otherwise
            each worker keeps its own.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.LocalSGD(8, start_step=1000)
    )
    ```

    Reference: [Stich, 2018](https://arxiv.org/abs/1805.09767);
    [Lin et al., 2018](https://arxiv.org/abs/1808.07217) for `start_step`.
    """

    local = True
    on_parameter_servers = True
    # Everything at once, as soon as it is due.
    fragments, overlap_steps, alpha = 1, 0, 0.0

    def __init__(self, every: int, start_step: int = 0, average_slots: bool = False) -> None:
        self.every = whole_number("every", every, 1)
        self.start_step = whole_number("start_step", start_step, 0)
        self.average_slots = flag("average_slots", average_slots)

    def on_replica(self, context: Context) -> LocalSteps:
        return LocalSteps(self, context)


# Many steps of each worker alone; an outer optimizer takes their mean for its gradient.


def nesterov() -> keras.optimizers.Optimizer:
    """The outer optimizer of the DiLoCo paper."""
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


class DiLoCo(Updates):
    """Each worker steps alone; every some steps, an outer optimizer steps along the mean way.

    What weights have changed by since the last outer step, averaged over the workers and negated,
    is the gradient that the outer optimizer applies to the weights as they were then.

    With `fragments`, the variables are dealt into as many parts, and each has its outer step at a
    time of its own, so that no step sends everything. With `overlap_steps`, what a part has changed
    by is sent while so many further steps are computed, and the outer step comes after them; the
    part is then `alpha` times the worker's own weights plus `1 - alpha` times the new common ones
    (Streaming DiLoCo).

    Args:
        every: Steps between two outer steps of a variable.
        outer_optimizer: Function without arguments that makes a Keras optimizer, the name or the
            `keras.optimizers.serialize` of one, or an optimizer to be copied (an optimizer's
            variables start TensorFlow, which a strategy of several workers does not allow). By
            default `SGD(0.7, momentum=0.9, nesterov=True)`.
        fragments: Number of parts, at most 10,000; `every` must be divisible by it.
        overlap_steps: Steps that go on while a part is sent; below `every / fragments`.
        alpha: Part of a worker's own weights after an outer step, in [0, 1). By default 0.5 with
            `overlap_steps`, else 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.DiLoCo(
            100, outer_optimizer=lambda: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True)
        ),
        compression="int8",
    )
    ```

    Reference: [Douillard et al., 2023](https://arxiv.org/abs/2311.08105);
    [Douillard et al., 2025](https://arxiv.org/abs/2501.18512) for streaming.
    """

    local = True
    start_step, average_slots = 0, False

    def __init__(
        self,
        every: int,
        outer_optimizer: Callable[[], keras.optimizers.Optimizer]
        | keras.optimizers.Optimizer
        | str
        | dict[str, Any] = nesterov,
        fragments: int = 1,
        overlap_steps: int = 0,
        alpha: float | None = None,
    ) -> None:
        self.every = every = whole_number("every", every, 1)
        self.fragments = fragments = whole_number("fragments", fragments, 1, most=10_000)
        self.overlap_steps = overlap_steps = whole_number("overlap_steps", overlap_steps, 0)
        if every % fragments:
            raise ValueError(
                "`every` must be divisible by `fragments`. "
                f"Received: every={every!r}, fragments={fragments!r}"
            )
        if overlap_steps >= every // fragments:
            raise ValueError(
                f"`overlap_steps` must be below every / fragments = {every // fragments}, so that "
                f"one part is under way at a time. Received: overlap_steps={overlap_steps!r}"
            )
        if alpha is None:
            alpha = 0.5 if overlap_steps else 0.0
        number("alpha", alpha, "in [0, 1)", lambda a: 0 <= a < 1)
        if not (
            callable(outer_optimizer)
            or isinstance(outer_optimizer, (str, dict, keras.optimizers.Optimizer))
        ):
            raise ValueError(
                "`outer_optimizer` must be a function without arguments that makes a Keras "
                "optimizer, the name or the serialized form of one, or an optimizer. "
                f"Received: outer_optimizer={shown(outer_optimizer)}"
            )
        _check_name(outer_optimizer)
        self.outer_optimizer = outer_optimizer
        self.alpha = float(alpha)

    def on_build(
        self, variables: list[keras.Variable]
    ) -> list[tuple[list[keras.Variable], keras.optimizers.Optimizer | None]]:
        parts = assign_to_fragments(variables, self.fragments)
        outers = [self.make_outer_optimizer() for _ in parts]
        for part, outer in zip(parts, outers):
            outer.build(part)
        return list(zip(parts, outers))

    def on_replica(self, context: Context) -> LocalSteps:
        return LocalSteps(self, context)

    def make_outer_optimizer(self) -> keras.optimizers.Optimizer:
        """Makes an outer optimizer, with its own variables.

        Returns:
            A `keras.optimizers.Optimizer`.

        Raises:
            ValueError: If `outer_optimizer` makes something else, or one that would not step
                each time.
        """
        given = self.outer_optimizer
        if isinstance(given, keras.optimizers.Optimizer):
            made = type(given).from_config(given.get_config())
        elif callable(given):
            made = given()
        else:
            made = keras.optimizers.get(given)
        if (
            not isinstance(made, keras.optimizers.Optimizer)
            or isinstance(made, keras.optimizers.LossScaleOptimizer)
            or made.gradient_accumulation_steps
        ):
            raise ValueError(
                "`outer_optimizer` must make a Keras optimizer without a loss scale and without "
                f"`gradient_accumulation_steps`. Received: outer_optimizer={given!r}, which makes "
                f"{made!r}"
            )
        return made


def _check_name(outer_optimizer: Any) -> None:
    """Raises ValueError for a name, or a serialized form, that Keras does not know.

    Making the optimizer would tell as well, and start TensorFlow.
    """
    name = outer_optimizer
    if isinstance(name, dict):
        name = name.get("class_name")
    elif not isinstance(name, str):
        return
    kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
    known = {k.__name__.lower() for k in kinds if issubclass(k, keras.optimizers.Optimizer)}
    is_known = isinstance(name, str) and (
        name.lower() in known or keras.saving.get_registered_object(name) is not None
    )
    if not is_known:
        raise ValueError(
            '`outer_optimizer` must name an optimizer of Keras\'s, such as "sgd", or have its '
            f"`class_name`. Received: outer_optimizer={shown(outer_optimizer)}"
        )
