"""When optimizers communicate, by a strategy's `updates=`: what is kept for each of them."""

import weakref

import tensorflow as tf

from keras_psplus.all_reduce import step as step_module
from keras_psplus.all_reduce.accumulation import Accumulation
from keras_psplus.all_reduce.compression_state import States


class Updating:
    """Takes the gradients of all optimizers, and has them applied when it is time.

    Args:
        policy: `keras_psplus.updates.Updates`.
        strategy: The strategy.
    """

    def __init__(self, policy, strategy):
        self.policy = policy
        self._strategy = weakref.ref(strategy)
        self._of_owner = weakref.WeakKeyDictionary()

    def apply(self, step, optimizer, grads, variables, apply):
        """Takes the gradients of one batch, in replica context.

        Args:
            step: The replica's `Step`.
            optimizer: The optimizer that they are given to.
            grads: List of tensors, `tf.IndexedSlices` or None.
            variables: Their Keras variables.
            apply: Function of gradients and variables that has Keras sum and apply them.
        """
        kept = self._kept(optimizer)
        kept.optimizer = weakref.ref(optimizer)
        replica = tf.distribute.get_replica_context()._replica_id
        units = kept.units[replica]
        # An optimizer may be given one part of its variables now and another then.
        key = tuple(id(v) for g, v in zip(grads, variables) if g is not None)
        if key not in units:
            units[key] = Accumulation(
                self.policy, kept.states[replica], str(len(units)), grads, variables
            )
        units[key](step, grads, apply)

    def finish(self, optimizer):
        """Has everything applied that is still to be; on all workers.

        Args:
            optimizer: The optimizer.
        """
        kept = self._kept(optimizer)
        number = len(kept.units[0])
        if number and kept.finish[0] != number:

            def finish_replica():
                step = step_module.current()
                # Or the optimizer would hand the gradients to us again.
                step.recording = False
                replica = tf.distribute.get_replica_context()._replica_id
                for unit in kept.units[replica].values():
                    unit.finish(step, kept.optimizer().apply)

            run = self._strategy().run
            kept.finish = number, tf.function(lambda: run(finish_replica))
        if number:
            kept.finish[1]()

    def batches(self, optimizer):
        """Number of batches whose gradients wait for an update."""
        return sum(unit.batches for unit in self._kept(optimizer).units[0].values())

    def states(self, optimizer):
        """What is kept for an optimizer on this worker, as a trackable."""
        states = self._kept(optimizer).states
        return tf.train.Checkpoint(**{f"replica_{i}": one for i, one in enumerate(states)})

    def _kept(self, optimizer):
        # A loss scale is none of its business.
        owner = getattr(optimizer, "inner_optimizer", optimizer)
        if owner not in self._of_owner:
            self._of_owner[owner] = _Kept(self._strategy().extended.worker_devices)
        return self._of_owner[owner]


class _Kept:
    """What is kept for one optimizer."""

    def __init__(self, devices):
        self.states = [States(device) for device in devices]
        self.units = [{} for _ in devices]
        self.optimizer = None
        self.finish = 0, None
