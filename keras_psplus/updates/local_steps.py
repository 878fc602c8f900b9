"""One replica's steps alone, and what makes its weights those of all replicas again."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_psplus.updates.base import Apply, Context, Grads, ReplicaUpdates, Step
from keras_psplus.updates.fragment import Fragment, LocalPolicy
from keras_psplus.updates.host_count import HostCount
from keras_psplus.updates.values import map_values


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
