"""One replica's steps alone, and what makes its weights those of all replicas again."""

import tensorflow as tf

from keras_psplus.all_reduce.fragment import Fragment


class LocalSteps:
    """Applies a replica's own gradients of some variables, and has fragments of them averaged.

    Args:
        policy: `updates.LocalSGD` or `updates.DiLoCo`.
        states: `States` of the replica.
        name: What tells these variables from others of the same optimizer.
        parts: For each fragment, the list of its Keras variables and its outer optimizer or None.
        averaged: Variables of the optimizer's that are averaged with the weights.
        sums: Function of tensors, Keras variables, a round and whether to compress, that sums
            over replicas.
    """

    def __init__(self, policy, states, name, parts, averaged, sums):
        self._policy = policy
        self._count = states.variable(f"{name} count", [], tf.int64)
        self._batches = states.variable(f"{name} batches", [], tf.int64)
        self._fragments = [
            Fragment(policy, states, f"{name} fragment {i}", variables, outer, sums)
            for i, (variables, outer) in enumerate(parts)
        ]
        # With the last one's weights: once in each round.
        self._fragments[-1].averaged = averaged

    def __call__(self, step, grads, variables, apply):
        """Takes the gradients of one batch.

        Args:
            step: The replica's `Step`.
            grads: Its part of the global gradients: tensors, `tf.IndexedSlices` or None.
            variables: Their Keras variables.
            apply: Function of a list of gradients and of variables that has Keras apply them.
        """
        start = self._policy.start_step
        if not start:
            self._alone(step, grads, variables, apply)
            return
        early = self._batches.read_value() < start
        self._batches.assign_add(1, read_value=False)
        tf.cond(
            early,
            lambda: apply(grads, variables),
            lambda: self._alone(step, grads, variables, apply),
        )

    def finish(self, step, apply):
        """Gives all replicas the same weights, if they may differ."""

        def finish():
            for fragment in self._fragments:
                fragment.finish(step)
            self._count.assign(0, read_value=False)

        tf.cond(self._count.read_value() > 0, finish, lambda: None)

    def _alone(self, step, grads, variables, apply):
        every, fragments = self._policy.every, self._fragments
        first = self._count.read_value() == 0
        for fragment in fragments:
            tf.cond(first, fragment.mark, lambda: None)
            # Reads nothing of this step: it travels while the step is computed.
            fragment.send_part()
        with step.applying_alone():
            apply([_over_share(step, gradient) for gradient in grads], variables)
        rows = step.rows()
        for fragment in fragments:
            fragment.see(rows)
            fragment.receive(step)
        self._count.assign_add(1, read_value=False)
        turn = tf.math.floormod(self._count.read_value(), every)
        for i, fragment in enumerate(fragments):
            due = tf.equal(turn, (i + 1) * every // self._policy.fragments % every)
            tf.cond(due, lambda fragment=fragment: fragment.send(step), lambda: None)


def _over_share(step, gradient):
    """The gradient of the mean over the replica's own rows."""
    if isinstance(gradient, tf.IndexedSlices):
        values = step.over_share(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else step.over_share(gradient)
