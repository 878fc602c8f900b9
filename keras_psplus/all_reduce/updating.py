"""When optimizers communicate, by a strategy's `updates=`: what is kept for each of them."""

import functools
import weakref

import tensorflow as tf

from keras_psplus.all_reduce import step as step_module
from keras_psplus.all_reduce.compression_state import States
from keras_psplus.all_reduce.local_steps import LocalSteps
from keras_psplus.updates.accumulation import Accumulation, forms_of


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

    def apply(self, step, optimizer, grads, variables, apply, averaged):
        """Takes the gradients of one batch, in replica context, after `prepare`.

        Args:
            step: The replica's `Step`.
            optimizer: The optimizer that they are given to.
            grads: List of tensors, `tf.IndexedSlices` or None.
            variables: Their Keras variables.
            apply: Function of gradients and variables that has Keras sum and apply them.
            averaged: Variables of the optimizer's that are averaged with the weights.
        """
        kept = self._kept(optimizer)
        kept.optimizer = weakref.ref(optimizer)
        replica = tf.distribute.get_replica_context()._replica_id
        units, states = kept.units[replica], kept.states[replica]
        # An optimizer may be given one part of its variables now and another then.
        key = tuple(id(v) for g, v in zip(grads, variables) if g is not None)
        if key not in units:
            name = str(len(units))
            if self.policy.local:
                parts = self._parts(optimizer, grads, variables)
                sums = functools.partial(self._sums, weakref.ref(_owner(optimizer)))
                units[key] = LocalSteps(self.policy, states, name, parts, averaged, sums)
            else:
                steps, forms = self.policy.steps, forms_of(grads)
                units[key] = Accumulation(steps, states, name, forms, variables)
        units[key](step, grads, variables, apply)

    def prepare(self, optimizer, variables):
        """Deals an optimizer's variables into fragments, before the first step.

        Args:
            optimizer: The optimizer.
            variables: All Keras variables that it will be given.
        """
        if not self.policy.local or self._kept(optimizer).fragments is not None:
            return
        if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
            # A loop of the script's own has begun without it.
            tf.distribute.get_replica_context().merge_call(
                lambda strategy: self._deal(self._kept(optimizer), variables)
            )
        else:
            self._deal(self._kept(optimizer), variables)

    def _deal(self, kept, variables):
        kept.fragments = [[] for _ in range(self.policy.fragments)]
        sizes = [0] * self.policy.fragments
        # The largest first, each to the fragment that is smallest by then.
        for variable in sorted(variables, key=_size, reverse=True):
            smallest = sizes.index(min(sizes))
            kept.fragments[smallest].append(variable)
            sizes[smallest] += _size(variable)
        if hasattr(self.policy, "make_outer_optimizer"):
            with self._strategy().scope():
                for fragment in kept.fragments:
                    outer = self.policy.make_outer_optimizer()
                    outer.build(fragment)
                    kept.outers.append(outer)

    def finish(self, optimizer):
        """Has everything applied that is still to be; on all workers.

        Args:
            optimizer: The optimizer.
        """
        kept = self._kept(optimizer)
        if optimizer is not _owner(optimizer):
            # The model may have been compiled anew, with another loss scale.
            kept.optimizer = weakref.ref(optimizer)
        number = len(kept.units[0])
        if number and kept.finish[0] != (number, kept.optimizer):

            def finish_replica():
                step = step_module.current()
                # Or the optimizer would hand the gradients to us again.
                step.recording = False
                replica = tf.distribute.get_replica_context()._replica_id
                for unit in kept.units[replica].values():
                    unit.finish(step, kept.optimizer().apply)

            run = self._strategy().run
            kept.finish = (
                (number, kept.optimizer),
                tf.function(lambda: run(finish_replica), autograph=False),
            )
        if number:
            kept.finish[1]()

    def training(self, variables):
        """The optimizers that have been given gradients of some of these Keras variables."""
        wanted = {id(variable) for variable in variables}
        return [
            owner
            for owner, kept in self._of_owner.items()
            if any(not wanted.isdisjoint(key) for key in kept.units[0])
        ]

    def batches(self, optimizer):
        """Number of batches whose gradients wait for an update."""
        return sum(unit.batches for unit in self._kept(optimizer).units[0].values())

    def states(self, optimizer):
        """What is kept for an optimizer on this worker, as a trackable."""
        kept = self._kept(optimizer)
        parts = {f"replica_{i}": one for i, one in enumerate(kept.states)}
        if self.policy.local:
            # Each replica's momenta are its own, too.
            variables = [v for one in (_owner(optimizer), *kept.outers) for v in one.variables]
            for j, variable in enumerate(variables):
                copies = self._strategy().experimental_local_results(variable.value)
                parts |= {f"variable_{j}_of_{i}": copy for i, copy in enumerate(copies)}
        return tf.train.Checkpoint(**parts)

    def _parts(self, optimizer, grads, variables):
        """The variables with gradients, by fragments, and each fragment's outer optimizer."""
        kept = self._kept(optimizer)
        trained = {id(v) for g, v in zip(grads, variables) if g is not None}
        outers = kept.outers or [None] * len(kept.fragments)
        return [
            ([v for v in fragment if id(v) in trained], outer)
            for fragment, outer in zip(kept.fragments, outers)
        ]

    def _sums(self, owner, tensors, variables, turn, compress):
        kind = "change" if compress else "copy"
        reducers = self._strategy().extended.reducers
        return reducers.sum(tensors, variables, turn, owner(), kind)

    def _kept(self, optimizer):
        owner = _owner(optimizer)
        if owner not in self._of_owner:
            self._of_owner[owner] = _Kept(self._strategy().extended.worker_devices)
        return self._of_owner[owner]


class _Kept:
    """What is kept for one optimizer."""

    def __init__(self, devices):
        self.states = [States(device) for device in devices]
        self.units = [{} for _ in devices]
        self.optimizer = None
        self.finish = None, None
        self.fragments = None
        self.outers = []


def _owner(optimizer):
    # A loss scale is none of its business.
    return getattr(optimizer, "inner_optimizer", optimizer)


def _size(variable):
    return variable.value.shape.num_elements()
