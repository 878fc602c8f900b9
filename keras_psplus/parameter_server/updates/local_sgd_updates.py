"""Workers that step alone, and what the chief knows of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from keras_psplus.parameter_server.tracing.local_copies import LocalCopies
from keras_psplus.parameter_server.updates.local_sgd import LocalSGDRounds
from keras_psplus.parameter_server.updates.worker_updates import WorkerUpdates

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from keras_psplus.parameter_server.context import StepContext
    from keras_psplus.parameter_server.updates.local_sgd import LocalSGDVariables
    from keras_psplus.updates import LocalSGD


class LocalSGDUpdates(WorkerUpdates):
    """`updates.LocalSGD`: each worker takes steps alone, and sends what they have changed.

    Args:
        context: The strategy's `StepContext`.
        policy: `keras_psplus.updates.LocalSGD`.
    """

    policy: LocalSGD
    _LOST = (
        "worker-%d was lost with %d step(s) that it had taken alone and not sent yet; they are "
        "missing from training"
    )

    def __init__(self, context: StepContext, policy: LocalSGD) -> None:
        super().__init__(context, policy)
        self._rounds: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, LocalSGDRounds] = (
            weakref.WeakKeyDictionary()
        )

    @contextlib.contextmanager
    def alone(
        self,
        variables: Mapping[keras.optimizers.Optimizer, LocalSGDVariables],
        constrain: Callable[[list[tf.Variable]], None],
    ) -> Iterator[None]:
        """Context of tracing one step of a worker, which changes its own copies.

        Args:
            variables: Dict from optimizers to their `LocalSGDVariables`.
            constrain: Function of weights that has them satisfy their constraints.
        """
        rounds = []
        for optimizer, of_optimizer in variables.items():
            if optimizer not in self._rounds:
                self._rounds[optimizer] = LocalSGDRounds(
                    self._context(), self.policy, weakref.ref(optimizer), of_optimizer, constrain
                )
            rounds.append(self._rounds[optimizer].open())
        handles: dict[int, tf.Tensor] = {}
        for one in rounds:
            self._note(one)
            handles |= one.handles()
        with LocalCopies(handles):
            yield
        for one in rounds:
            one.step()

    def _finisher(self, owner: keras.optimizers.Optimizer) -> tuple[int, Callable[[], None]]:
        rounds = self._rounds.get(owner)

        def finish() -> None:
            assert rounds is not None
            one = rounds.open()
            self._note(one)
            one.finish()

        return int(rounds is not None), finish

    def training(self, variables: Sequence[keras.Variable]) -> list[keras.optimizers.Optimizer]:
        """The optimizers that train some of these Keras variables, so far as they are known."""
        wanted = {id(variable._value) for variable in variables}
        return [
            optimizer
            for optimizer, rounds in self._rounds.items()
            if any(id(weight) in wanted for weight in rounds.variables.weights)
        ]
