"""Workers that step alone, and what the chief knows of them."""

import contextlib
import weakref

from keras_psplus.parameter_server.local_copies import LocalCopies
from keras_psplus.parameter_server.local_rounds import Rounds
from keras_psplus.parameter_server.updating import Updating


class LocalUpdating(Updating):
    """`updates.LocalSGD`: each worker takes steps alone, and sends what they have changed.

    Args:
        strategy: `ParameterServerStrategy`.
        policy: `keras_psplus.updates.LocalSGD`.
    """

    _LOST = (
        "worker-%d was lost with %d step(s) that it had taken alone and not sent yet; they are "
        "missing from training"
    )

    def __init__(self, strategy, policy):
        super().__init__(strategy, policy)
        self._rounds = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def alone(self, members, constrain):
        """Context of tracing one step of a worker, which changes copies of its own.

        Args:
            members: Dict from optimizers to their `Members`.
            constrain: Function of weights that has them satisfy their constraints.
        """
        rounds = []
        for optimizer, of_optimizer in members.items():
            if optimizer not in self._rounds:
                self._rounds[optimizer] = Rounds(
                    self._strategy(), self.policy, weakref.ref(optimizer), of_optimizer, constrain
                )
            rounds.append(self._rounds[optimizer].open())
        handles = {}
        for one in rounds:
            self._note(one)
            handles |= one.handles()
        with LocalCopies(handles):
            yield
        for one in rounds:
            one.step()

    def _finisher(self, owner):
        rounds = self._rounds.get(owner)

        def finish():
            one = rounds.open()
            self._note(one)
            one.finish()

        return int(rounds is not None), finish

    def training(self, variables):
        """The optimizers that train some of these Keras variables, so far as they are known."""
        wanted = {id(variable._value) for variable in variables}
        return [
            optimizer
            for optimizer, rounds in self._rounds.items()
            if any(id(weight) in wanted for weight in rounds.members.weights)
        ]
