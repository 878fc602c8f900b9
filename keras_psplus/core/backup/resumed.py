"""State of a `fit` that was read from a backup, on each worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_psplus.core.backup import training_state
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.tables.row_variable import is_keyed

if TYPE_CHECKING:
    from keras_psplus.core.backup.training_state import TrainingState


class Resumed:
    """State of a `fit` between its reading and the first resumed step.

    Args:
        model: The model, with its weights of then.
        facts: Facts of a `TrainingState`.
        weights: For each callback that keeps weights, a list of them.
    """

    def __init__(
        self, model: keras.Model, facts: dict[str, Any], weights: dict[str, list[np.ndarray]]
    ) -> None:
        self.facts, self.weights = facts, weights
        self._metrics = [variable.numpy() for variable in model.metrics_variables]
        self._rates = [rate.numpy() for rate in _rates(model)]

    def assign(self, model: keras.Model) -> None:
        """Assigns what Keras has reset and callbacks may have changed as an epoch began."""
        for variable, value in zip(model.metrics_variables, self._metrics):
            variable.assign(value)
        for variable, value in zip(_rates(model), self._rates):
            variable.assign(value)


def weights_of_callbacks(
    model: keras.Model,
    facts: dict[str, Any],
    state: TrainingState | None,
    share: Callable[[list[keras.Variable]], None],
    meet: Callable[[], Any],
) -> dict[str, list[np.ndarray]]:
    """Gives all workers the weights that callbacks of the chief's backup kept.

    They travel as the model's own, which all but the chief have to be given after that.

    Args:
        state: The state, on the chief; None on others.
        share: Function that gives all workers the chief's values of Keras variables.
        meet: Function that waits for all workers.

    Returns:
        For each callback that keeps weights, a list of them.
    """
    found = {}
    counts = training_state.counts_of_weights(facts["callbacks"])
    # Rows of dynamic tables stay where they are: the chief's are those that count.
    weights = [weight for weight in model.weights if not is_keyed(weight)]
    own = [weight.numpy() for weight in weights] if state is not None and counts else []
    for name, count in counts.items():
        kept = [] if state is None else state.weights_of_callback(name, count, model)
        for weight, value in zip(model.weights, kept):
            if not is_keyed(weight):
                weight.assign(value)
        # Of variables in shares, the chief has given the others their parts.
        meet()
        share(weights)
        of_model = enumerate(model.weights)
        found[name] = [kept[i] if is_keyed(w) and kept else w.numpy() for i, w in of_model]
        meet()
    for weight, value in zip(weights, own):
        weight.assign(value)
    return found


def _rates(model: keras.Model) -> list[keras.Variable]:
    rates = [optimizer._learning_rate for optimizer in optimizers_of(model).values()]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]
