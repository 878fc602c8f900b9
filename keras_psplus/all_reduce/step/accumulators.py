"""Keras's accumulated gradients: each replica's own while it trains, their sum where they are seen.

With `gradient_accumulation_steps` nothing is sent between updates, so that each replica has its own
sums. A file, a backup or a callback has to see those of the global batch, and another number of
workers has to be able to go on with them:

    global      all replicas hold the sum over all of them: when they are new, when they have been
                read from a file, and once `make_global` has summed them
    a step      leaves what is global to the first replica, zeros to the others, and each adds its
                own: the sum over all of them is what one process has
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.log import warn_once
from keras_psplus.tf_internals.own_copy import own_copy

if TYPE_CHECKING:
    import keras


class Accumulators:
    """The accumulated gradients of all optimizers of a strategy.

    Args:
        sum_all: Function of tensors and their Keras variables that sums over the replicas, in
            replica context.
    """

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
        """Gives all replicas the sums over all of them; on all workers, between steps.

        Args:
            model: The model whose variables they are the gradients of.
        """
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
