"""Gradients of several batches, sent and applied as one."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.arguments import flag, whole_number
from keras_psplus.updates.base import (
    Apply,
    Context,
    Form,
    Grads,
    ReplicaUpdates,
    States,
    Step,
    Updates,
    no_rows_of,
    zeros_like,
)
from keras_psplus.updates.local_sgd import HostCount

# One replica's gradients, summed until there are enough of them for an update.


class Accumulation(ReplicaUpdates):
    """Sums the gradients of some variables on one replica, each weighted by its batch's rows.

    Args:
        steps: Batches for each update.
    """

    def __init__(self, steps: int, context: Context) -> None:
        states, name, forms, self._variables, *_ = context
        self._steps = steps
        self._count = HostCount(states, f"{name} count")
        self._rows = states.variable(f"{name} rows", [], tf.float64)
        self._sums = [
            None
            if form is None
            else (_Dense if form.index_dtype is None else _Rows)(states, f"{name} sum {i}", form)
            for i, form in enumerate(forms)
        ]

    @property
    def count(self) -> tf.Tensor:
        return self._count.read()

    def on_gradients(
        self, step: Step, grads: Grads, variables: Sequence[keras.Variable], apply: Apply
    ) -> None:
        _, rows = step.rows()
        parts: list[Any] = [
            None if one is None else one.weighted(gradient, rows)
            for one, gradient in zip(self._sums, grads)
        ]
        self._count.add_one()
        self._rows.assign_add(tf.cast(rows, tf.float64), read_value=False)

        def update() -> None:
            # With the last batch's as tensors, so that each is sent as soon as backprop has it.
            self._update(apply, parts)

        def keep() -> None:
            for one, part in zip(self._sums, parts):
                if one is not None:
                    one.add(part)

        is_full = self._count.satisfies(lambda count: count >= self._steps)
        tf.cond(is_full, update, keep)

    def on_finish(self, step: Step, apply: Apply) -> None:
        nothing = [None] * len(self._sums)
        waits = self._count.satisfies(lambda count: count > 0)
        tf.cond(waits, lambda: self._update(apply, nothing), lambda: None)

    def _update(self, apply: Apply, parts: Sequence[Any]) -> None:
        rows = self._rows.read_value()
        means = [
            None if one is None else one.mean(part, rows) for one, part in zip(self._sums, parts)
        ]
        apply(means, self._variables)
        for one in self._sums:
            if one is not None:
                one.clear()
        self._count.set(0)
        self._rows.assign(0.0, read_value=False)


class _Dense:
    """The sum of dense gradients, in float32 at least."""

    def __init__(self, states: States, name: str, form: Form) -> None:
        self._dtype, self._shape = form.dtype, tuple(form.shape)
        self._sum = states.variable(name, self._shape, _wide(form.dtype))

    def weighted(self, gradient: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        wide = self._sum.dtype
        return tf.ensure_shape(tf.cast(gradient, wide), self._shape) * tf.cast(rows, wide)

    def add(self, part: tf.Tensor) -> None:
        self._sum.assign_add(part, read_value=False)

    def mean(self, part: tf.Tensor | None, rows: tf.Tensor) -> tf.Tensor:
        total = self._sum.read_value()
        total = total if part is None else total + part
        return tf.cast(tf.math.divide_no_nan(total, tf.cast(rows, total.dtype)), self._dtype)

    def clear(self) -> None:
        self._sum.assign(zeros_like(self._sum.read_value()), read_value=False)


class _Rows:
    """Rows of embeddings' gradients, one after the other, as one batch would have them.

    Those that a batch has once (of positions, or of sparse ids), a larger one has once as well.
    """

    def __init__(self, states: States, name: str, form: Form) -> None:
        self._dtype, self._shape = form.dtype, tuple(form.shape)
        self._join, self._add, wide = form.join, form.add, _wide(form.dtype)
        self._values = states.variable(f"{name} values", [None, *self._shape[1:]], wide)
        self._indices = states.variable(f"{name} indices", [None], form.index_dtype)

    def weighted(self, slices: tf.IndexedSlices, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        wide = self._values.dtype
        values = tf.ensure_shape(tf.cast(slices.values, wide), [None, *self._shape[1:]])
        # The next batch may be looked up by other integers.
        return values * tf.cast(rows, wide), tf.cast(slices.indices, self._indices.dtype)

    def _with(self, part: tuple[tf.Tensor, tf.Tensor] | None) -> Sequence[tf.Tensor]:
        values, indices = self._values.read_value(), self._indices.read_value()
        counts = [tf.size(indices)]
        if part is not None:
            values, indices = tf.concat([values, part[0]], 0), tf.concat([indices, part[1]], 0)
            counts.append(tf.size(part[1]))
        if self._add is None:
            return values, indices
        # Also where no part comes: workers then add what they have in the same way.
        added = self._add(tf.IndexedSlices(values, indices), tf.stack(counts))
        return added.values, added.indices

    def add(self, part: tuple[tf.Tensor, tf.Tensor]) -> None:
        values, indices = self._with(part)
        self._values.assign(values, read_value=False)
        self._indices.assign(indices, read_value=False)

    def mean(self, part: tuple[tf.Tensor, tf.Tensor] | None, rows: tf.Tensor) -> tf.IndexedSlices:
        values, indices = self._with(part)
        values = tf.math.divide_no_nan(values, tf.cast(rows, values.dtype))
        shape = tf.constant(self._shape, indices.dtype)
        slices = tf.IndexedSlices(tf.cast(values, self._dtype), indices, shape)
        return slices if self._join is None else self._join(slices)

    def clear(self) -> None:
        for variable in (self._values, self._indices):
            variable.assign(no_rows_of(variable.read_value()), read_value=False)


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype.size < 4 else dtype


class Accumulate(Updates):
    """Sums gradients on each worker for some batches, then sends them once and updates once.

    An update equals one on a batch of all their rows: the gradient is the mean over all rows, also
    if batches are uneven. The optimizer's iterations, learning-rate schedules, clipping and moving
    averages go by updates.

    Args:
        steps: Batches for each update.
        flush: Whether the end of an epoch updates with what there is. Otherwise the next epoch
            carries on.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    ```python
    strategy = keras_psplus.MultiWorkerMirroredStrategy(
        updates=keras_psplus.updates.Accumulate(4)
    )
    ```

    Reference: [Ott et al., 2018](https://arxiv.org/abs/1806.00187), section 3.2.
    """

    on_parameter_servers = True

    def __init__(self, steps: int, flush: bool = False) -> None:
        self.steps = whole_number("steps", steps, 1)
        self.flush = flag("flush", flush)

    def on_replica(self, context: Context) -> Accumulation:
        return Accumulation(self.steps, context)
